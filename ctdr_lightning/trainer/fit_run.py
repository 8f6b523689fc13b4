"""The state of one fit, and its work at each of Lightning's hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.gpu_memory import free_cache, use_expandable_segments
from ctdr_lightning.basics.progress_bar import one_bar
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.recovery.transaction import all_or_nothing, layers_as_now
from ctdr_lightning.trainer.accuracy.auto_rank import AutoRank
from ctdr_lightning.trainer.accuracy.coach import Coach
from ctdr_lightning.trainer.accuracy.training_data import TrainingData
from ctdr_lightning.trainer.checkpoints import leave_note, write_complete_files
from ctdr_lightning.trainer.modules import has_compiled_step, overrides
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.randomness import Randomness
from ctdr_lightning.trainer.reports.loggers import log_scalars
from ctdr_lightning.trainer.reports.monitor import Monitor
from ctdr_lightning.trainer.reports.opening import wrapped
from ctdr_lightning.trainer.reports.reporter import Reporter
from ctdr_lightning.trainer.run_state import RunState
from ctdr_lightning.trainer.shards import check_layers, check_recovery, share_factors, show_shards, warn_of_other_layers
from ctdr_lightning.trainer.strategies import check_callbacks, check_compiled, check_device, check_strategy, is_sharded
from ctdr_lightning.trainer.structure import factorized_names, match_structure
from ctdr_lightning.trainer.surgeon import Surgeon
from ctdr_lightning.trainer.training_step.device import peak_flops
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.optimizer.candidate_account import candidate_account
from ctdr_lightning.trainer.training_step.optimizer.in_backward import StepInBackward
from ctdr_lightning.trainer.training_step.optimizer.replaced import ReplacedParameters
from ctdr_lightning.trainer.training_step.optimizer.states import OptimizerStates
from ctdr_lightning.trainer.training_step.pipeline import StepRunner
from ctdr_lightning.trainer.training_step.retry.retry import is_out_of_memory
from ctdr_lightning.trainer.training_step.spare_means import SpareMeans, by_means
from ctdr_lightning.trainer.training_step.sub_batches.sub_batches import SubBatches


class FitRun:
    """The parts that carry a fit out, and what they do at each of Lightning's hooks, whose names the methods bear.

    Args:
        options: The callback's arguments.
        refusal: Raised where batches cannot be cut; None raises the obstacle itself.

    Attributes:
        surgeon: Decides which layers are cut, and cuts them.
        coach: Wins the accuracy back; None without recovery.
        memory: Plans the steps.
        states: Keeps the optimizers' state elsewhere, where that is asked for.
        in_backward: Updates parameters inside the backward, where that is asked for.
        steps: Wraps ``training_step`` and ``backward``.
        monitor: Counts batches and samples.
        reporter: Reports the run.
        randomness: Restores and saves the state of random generators.

    Raises:
        ConfigError: If recovery is asked for and nothing is decomposed.

    Example:
        >>> run = FitRun(CallbackOptions(rank=0.5))
        >>> run.surgeon.decomposes, run.coach
        (True, None)
    """

    def __init__(self, options: CallbackOptions, refusal: InfeasibleBudgetError | None = None) -> None:
        self._options = options
        self.surgeon = Surgeon(options.decomposition(), options.read_choices(), options.recovery)
        if options.recovery is not None and not self.surgeon.decomposes:
            raise ConfigError("recovery is given, but nothing is decomposed.", "Give rank=, or leave recovery out.")
        self.coach = Coach(options.recovery, self.surgeon, options.verbose) if options.recovery is not None else None
        self.memory = MemoryStage(options)
        self.states = OptimizerStates(options.optimizer_state, options.disk_folder)
        self._replaced = ReplacedParameters()
        self.in_backward = StepInBackward(asked=options.optimizer_step == "in_backward")
        cut = options.sub_batches
        norms = bool(options.batch_norm_in_parts)
        self._sub_batches = SubBatches(cut, self.memory, batch_norm=norms, refusal=refusal) if cut is not None else None
        self.steps = StepRunner(
            self.memory, self.in_backward, self._sub_batches, self.coach, retries=options.retry_on_oom
        )
        self.monitor = Monitor()
        self.reporter = Reporter(options, self.surgeon, self.memory, self.steps, self.monitor)
        self.randomness = Randomness()
        self._choice: AutoRank | None = None
        self._hook: Any = None
        self._steps_before = 0
        self._served: tuple[ref[Trainer], ref[LightningModule]] | None = None

    @classmethod
    def by_other_means(
        cls, options: CallbackOptions, trainer: Trainer, module: LightningModule, error: InfeasibleBudgetError
    ) -> FitRun:
        """A run with dense layers and one more means, for a budget that no plan of a whole batch keeps.

        Args:
            options: The callback's arguments.
            trainer: About to train.
            module: The model.
            error: The refusal of the whole batch.

        Raises:
            InfeasibleBudgetError: This error, where an argument, the module or the trainer speaks against it.
        """
        found = by_means(options, trainer, module, error)
        if found is None:
            raise error
        chosen, means = found
        if options.verbose:
            rank_zero_info(wrapped(f"CTDR: {error.problem} All layers stay dense, and {means}."))
        return cls(chosen, error)

    @property
    def budget_fit(self) -> BudgetFit | None:
        """The choice of ``rank="auto"`` on this rank, and its predictions; None without a choice."""
        return self._choice.fit if self._choice is not None else None

    def serves(self, module: LightningModule) -> bool:
        """Whether the run is this model's, or nobody's yet."""
        return self._served is None or self._served[1]() is module

    def follow_structure(self, module: LightningModule) -> None:
        """From now on a checkpoint that the module loads may have other layers than the module; twice is once."""
        if self._hook is None:
            self._hook = module.register_load_state_dict_pre_hook(match_structure)

    def setup(self, trainer: Trainer, module: LightningModule, callback: Callback) -> None:
        """Check that the fit can be, and decompose, before optimizers exist and before any checkpoint is read.

        Args:
            trainer: About to train.
            module: The model; under another trainer than before only the schedule begins again.
            callback: Whose run this is.
        """
        if self._served is not None and self._served[0]() is not trainer and self.coach is not None:
            self.coach.begin_again()
        self._served, self.randomness = (ref(trainer), ref(module)), Randomness()
        if self._options.memory_budget is not None:
            use_expandable_segments(trainer.strategy.root_device)  # before the model is there
        self.follow_structure(module)
        if self._options.prefers_dense and has_compiled_step(module):
            self.surgeon.leave_dense()  # its steps have no plan that a cut could be weighed against
        self._or_leave_dense(partial(self._check, trainer, module, callback))
        write_complete_files(trainer.strategy)
        if not is_sharded(trainer.strategy) and overrides(module, "configure_model"):
            module.configure_model()
        self._or_leave_dense(partial(self._cut_if_asked, trainer, module))
        if self._options.memory_budget is not None:
            free_cache()  # of the steps that a choice of ranks ran: the weights would come to lie among their pieces

    def _or_leave_dense(self, attempt: Callable[[], None]) -> None:
        """Make an attempt; where it fails for a cut that nobody asked for, leave the layers dense and make it again."""
        try:
            attempt()
        except ConfigError as error:
            if self._options.asks_for_cuts or not self.surgeon.decomposes:
                raise
            self.surgeon.leave_dense()
            attempt()
            if self._options.verbose:
                rank_zero_info(wrapped(f"CTDR: all layers stay dense: {error.problem}"))

    def _check(self, trainer: Trainer, module: LightningModule, callback: Callback) -> None:
        recovery, cuts = self._options.recovery, self.surgeon.decomposes
        chooses, untested = self._options.fits_budget, self._options.allow_untested
        check_strategy(trainer.strategy, cuts=cuts, chooses=chooses, allow_untested=untested)
        if is_sharded(trainer.strategy) and recovery is not None:
            check_recovery(recovery)
        plans = self._options.plans_memory
        check_device(trainer.strategy.root_device, plans=plans, allow_untested=untested)
        check_callbacks(trainer, callback, cuts=cuts, staged=recovery is not None and recovery.staged)
        bounded, moves = self._options.memory_budget is not None, self._options.offload is not None
        distills = recovery is not None and recovery.distill
        check_compiled(module, plans=plans, bounded=bounded, moves=moves, distills=distills)

    def _cut_if_asked(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.surgeon.decomposes:
            return
        sharded, cut_before = is_sharded(trainer.strategy), self.surgeon.choices is not None
        if sharded and not cut_before:
            given = self._options.choices is not None
            check_layers(module, "choices=..." if given else f"rank={self._options.rank!r}")
        self.cut(trainer, module)
        if sharded and not cut_before:
            share_factors(trainer.strategy, module)
        if sharded and self.coach is not None:
            self.coach.before_shards(module)

    def cut(self, trainer: Trainer, module: LightningModule) -> None:
        """Decide the decomposition, and make the cuts that precede training; completely or not at all."""
        self._replaced.cut_begins(module)
        coaching = [self.coach.as_now()] if self.coach is not None else []
        shown = one_bar(self._options.verbose and trainer.is_global_zero)
        with shown, all_or_nothing(layers_as_now(module), self.surgeon.as_now(), *coaching):
            self.surgeon.adopt(module)
            if self.coach is not None:
                self.coach.prepare(module, sharded=is_sharded(trainer.strategy))
            self.surgeon.decide(module, trainer.strategy, self._decomposer(trainer, module))
            if self.coach is not None:
                self.coach.cut_at_start(module)
            else:
                self.surgeon.cut(module, 1)
        self.reporter.fit = self.budget_fit
        if self.budget_fit is not None:
            self.memory.start_in_tiles(self.budget_fit.tiles)

    def _decomposer(self, trainer: Trainer, module: LightningModule) -> TrainingData | None:
        """The decomposer that uses training data, on every rank alike; None if the options do not ask for it."""
        weightless = any(parameter.is_meta for parameter in module.parameters())
        if self._options.data != "train" or self.surgeon.choices is not None or weightless:
            return None
        automatic = self._options.fits_budget and self._options.choices is None
        account = partial(candidate_account, trainer, self._options)
        means = SpareMeans(trainer, self._options, module)
        self._choice = AutoRank(trainer, self._options, account, means) if automatic else None
        return self._choice or TrainingData(trainer)

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse to train when nothing was decomposed; a checkpoint has been read by now."""
        self.surgeon.check()
        if self.surgeon.adopted:
            self.reporter.adopted(module, self._options)
        self.reporter.print_decomposition(module)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Take up the random state of a resumed run; recover from the cut of a fresh one; wrap the step."""
        self.randomness.train_start(trainer)
        if self.coach is not None:
            self.coach.train_start(trainer, module)
        self._attach(trainer, module)
        log_scalars(trainer, module, self.reporter.parameter_counts(trainer, module), on_epoch=True)
        if peak_flops(trainer) is not None:
            self.steps.meters.count_next()
        self.monitor.start()

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Cut, roll back, or change phase; count the weights anew, to which pruning adds its masks between epochs."""
        self.randomness.epoch_start(trainer)
        if self.coach is not None:
            self.steps.release()
            self.states.release()  # a cut gives the optimizers other parameters
            self.in_backward.release()
            self.coach.epoch_start(trainer, module)
            self._attach(trainer, module)
        elif not has_compiled_step(module):
            self.memory.prepare(trainer, module)

    def _attach(self, trainer: Trainer, module: LightningModule) -> None:
        self._replaced.check(trainer, module)
        self.states.attach(trainer)
        if self._sub_batches is not None:
            self._sub_batches.check(trainer, module)
        self.in_backward.attach(trainer, module, keeps_gradients=bool(self._options.keep_gradients))
        if not has_compiled_step(module):
            self.memory.prepare(trainer, module)
        self.steps.attach(module)

    def on_train_batch_start(self, trainer: Trainer) -> None:
        """Start the clock; say whether the batch is to be measured."""
        self._steps_before = trainer.global_step
        self.steps.meters.batch_begins(metered=self.monitor.meters_next(trainer) or self.memory.meters(trainer))
        self.monitor.batch_start()

    def on_after_backward(self, module: LightningModule) -> None:
        """The step's backward is over; under manual optimization another may follow."""
        if module.automatic_optimization:
            self.steps.backward_done()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Count the step, and log at the trainer's interval."""
        measured = self.steps.batch_done()
        self.memory.batch_done()
        if measured is not None:
            self.memory.batch_measured(measured)
        stepped = trainer.global_step > self._steps_before
        if stepped:
            self.memory.step_done(trainer, measured)
            if self.coach is not None:
                self.coach.step_done()
        self.monitor.batch_end(batch, stepped=stepped, usual=self.memory.was_usual())  # which may have planned anew
        if self.monitor.due(trainer):
            values = self.reporter.interval(trainer)
            values |= self.coach.step_logs() if self.coach is not None else {}
            log_scalars(trainer, module, values, on_step=True)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Validation is not part of the step time, nor is the work before it at the end of an epoch."""
        self.monitor.pause()
        if trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.is_last_batch:
            self._epoch_trained(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Read the metric that recovery goes by; free weights that validation left gathered, so that steps agree."""
        self.monitor.resume()
        show_shards(module)
        self.reporter.validated(trainer)
        if self.coach is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self.coach.validation_end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Stop when recovered."""
        self.randomness.epoch_end(trainer)
        self.monitor.pause()
        self._epoch_trained(trainer, module)
        self.monitor.resume()
        if self.coach is not None:
            log_scalars(trainer, module, self.coach.logs(), on_epoch=True)
            self.coach.epoch_end(trainer)

    def _epoch_trained(self, trainer: Trainer, module: LightningModule) -> None:
        if self.coach is not None:
            self.steps.release()  # the module is copied; the next epoch wraps its step again
            self.states.release()  # and so is the optimizers' state
            self.in_backward.release()
            self.coach.epoch_trained(trainer, module)

    def on_train_end(self, trainer: Trainer) -> None:
        """Leave the module as it was found, apart from its layers."""
        self.randomness.release(trainer)
        self.release()

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Roll back a last cut that did not recover; print the summary."""
        if self.coach is not None:
            self.coach.fit_end(module)
        self.reporter.close(trainer, module, self.coach)

    def on_exception(self, trainer: Trainer, module: LightningModule, error: BaseException) -> None:
        """Release everything; the module stays usable. If memory ran out, its account is written first."""
        if is_out_of_memory(error):
            self.reporter.write_out_of_memory_report(trainer, module, error)
        if is_sharded(trainer.strategy) and trainer.ckpt_path is not None:
            warn_of_other_layers(module, trainer.ckpt_path)
        self.randomness.release(trainer)
        self.teardown()

    def release(self) -> None:
        """End a step that is under way, and unwrap it."""
        self.steps.release()
        self.memory.release()
        self.states.release(over=True)
        self.in_backward.release()
        if self.coach is not None:
            self.coach.release()

    def teardown(self) -> None:
        """Leave the module for good."""
        self.release()
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def state(self) -> RunState:
        """State for a checkpoint, without the random state, which every rank has."""
        recovery = self.coach.state_dict() if self.coach is not None else None
        return RunState(self._options.to_dict(), self.surgeon.surgery(), self.monitor.stepped, recovery)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note in the file that its layers are factorized."""
        if factorized_names(module):
            leave_note(checkpoint, trainer.strategy)

    def on_load_checkpoint(
        self, trainer: Trainer, module: LightningModule, state: RunState, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint that training cannot go on from, before any time is spent."""
        wished = self.surgeon.choices
        self.surgeon.load(state.surgery, factorized_names(module))
        decided = not self.surgeon.decomposes or state.surgery.choices is not None
        if not decided:  # the run ended before its first cut, and its weights are the dense model's
            self.surgeon.cut(module, self.coach.progress.stage if self.coach is not None else 1)
        if decided:
            self.reporter.resumed(wished, state.options, self._options)
        if self.coach is None and state.recovery is not None:
            self.reporter.recovery_ends(state)
        self.randomness.load(trainer, state.random, checkpoint, at_once=not decided)

    def take_up(self, state: RunState) -> None:
        """Go on where a checkpoint's run stood."""
        self.surgeon.load(state.surgery)
        if self.surgeon.decomposes and state.surgery.choices is None:
            return
        self.monitor.stepped = state.stepped
        if self.coach is not None and state.recovery is not None:
            self.coach.load_state_dict(state.recovery)
