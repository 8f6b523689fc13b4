"""The callback: Lightning's hooks, each one call into a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from ctdr_lightning.basics.documents import CALLBACK_STATE_VERSION as STATE_VERSION
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition import Choices
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.recovery import Recovery
from ctdr_lightning.recovery.transaction import all_or_nothing, layers_as_now
from ctdr_lightning.trainer.accuracy.budget_choice import BudgetChoice
from ctdr_lightning.trainer.accuracy.choosing import TrainingData
from ctdr_lightning.trainer.accuracy.coach import Coach
from ctdr_lightning.trainer.checkpoints import CompleteFileIO, leave_note, write_complete_files
from ctdr_lightning.trainer.modules import is_compiled, overrides
from ctdr_lightning.trainer.options import CallbackOptions, read_state
from ctdr_lightning.trainer.randomness import Randomness
from ctdr_lightning.trainer.reports.loggers import log_scalars
from ctdr_lightning.trainer.reports.monitor import Monitor
from ctdr_lightning.trainer.reports.reporter import Reporter
from ctdr_lightning.trainer.strategies import check_callbacks, check_compiled, check_strategy, is_sharded
from ctdr_lightning.trainer.structure import factorized_names, match_structure
from ctdr_lightning.trainer.surgeon import Surgeon
from ctdr_lightning.trainer.training_step.device import peak_flops
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.retry import is_out_of_memory
from ctdr_lightning.trainer.training_step.step_runner import StepRunner

RankValue = float | int | str
_OF_ONE_RUN = (
    "surgeon", "coach", "memory", "engine", "monitor", "reporter", "log", "log_dict", "_hook", "_random", "_steps",
    "_served", "_choice",
)  # fmt: skip


class CTDRCallback(Callback):
    """Decompose a model, run its steps under a memory budget, and win its accuracy back.

    Args:
        rank: Share of parameters that all layers together keep (float), a rank (int), ``"vbmf"``, ``"error=0.05"``,
            ``"energy=0.99"``, or a mapping from layer pattern to any of these, where a float is each layer's own share;
            ``"auto"`` chooses ranks and plan together for ``memory_budget``; None decomposes nothing.
        method: Decomposition method, or ``"auto"``: for each layer the one of least error at equal parameters.
        select: Patterns of the layers to take (``"features.*"``); ``!`` leaves out; None takes all.
        memory_budget: Bytes a step may take: ``"8GiB"``, a number, or a fraction of the device's memory.
        policy: Name of the memory policy. Without a budget ``"auto"`` makes the peak as small as it can be in no more
            than the dense model's time, and ``"keep"`` plans nothing.
        recovery: True for the default schedule, a `Recovery`, its fields, or a YAML file; None for no recovery.
        choices: A report's ``choices``, or their JSON or YAML file, in the place of ``rank``, ``method`` and
            ``select``.
        allocate: What a float ``rank`` is a share of: ``"loss"`` (parameters, spent by what the training data tell),
            ``"parameters"``, ``"flops"``, ``"memory"`` or ``"seconds"``; None gives every layer its own share;
            ``"auto"`` is ``"loss"`` where the data can be had when training is set up, else ``"parameters"``.
        data: ``"train"``: a few training batches tell how much the loss minds each layer's error, and the factors are
            refitted on them. They move no random state. None goes by the weights alone.
        max_slowdown: Without a budget, and with ``rank="auto"``: how long a step may take, in steps of the dense model.
        max_loss: With ``rank="auto"``: largest mean KL to the dense outputs; without a budget 0.005 nats.
        retry_on_oom: Run a step that ran out of memory again, under a tighter plan and as if it had never failed; where
            that cannot be, the error says why.
        keep_gradients: Whether the gradients of one step may be read in the next one's forward. True keeps them and
            counts their bytes; False frees them before the forward where the plan needs their bytes; None does so
            unless the module's own code reads them.
        over_budget: A step that cannot fit the budget is refused (``"raise"``), or run as small as it can be with one
            warning (``"least"``); ``"auto"`` refuses the first kind of step and runs later ones, such as a longer
            sequence in mid-epoch.
        allow_untested: Go on under a strategy that is not among the tested ones.
        verbose: Print what was decomposed and planned.
        offload: Where saved tensors may wait besides the device: ``"host"``, ``"disk"``, or a list of these.
        disk_folder: Folder of the disk's file; None takes the system's folder for temporary files.
        codecs: How saved tensors may be written smaller: ``"exact"`` in ways that leave every gradient as it is, a list
            of names for others, None not at all.

    Raises:
        ConfigError: When an argument cannot be used.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[CTDRCallback(rank=0.5, recovery=True)], logger=False)
    """

    def __init__(
        self,
        rank: RankValue | dict[str, RankValue] | None = 0.5,
        method: str = "auto",
        select: str | list[str] | None = None,
        memory_budget: int | float | str | None = None,
        policy: str = "auto",
        recovery: Recovery | dict[str, Any] | str | bool | None = None,
        choices: Choices | dict[str, Any] | str | None = None,
        allocate: str | None = "auto",
        data: str | None = "train",
        max_slowdown: float = 1.0,
        max_loss: float | None = None,
        retry_on_oom: bool = True,
        keep_gradients: bool | None = None,
        over_budget: str = "auto",
        allow_untested: bool = False,
        verbose: bool = True,
        offload: str | list[str] | None = None,
        disk_folder: str | Path | None = None,
        codecs: str | list[str] | None = None,
    ) -> None:
        super().__init__()
        self.options = CallbackOptions(
            rank, method, select, memory_budget, policy, Recovery.read(recovery), choices, allocate, data, max_slowdown,
            max_loss, retry_on_oom, keep_gradients, over_budget, allow_untested, verbose, offload, disk_folder, codecs,
        )  # fmt: skip
        self._begin()

    def _begin(self) -> None:
        """Make what one run needs; nothing of an earlier run is left."""
        schedule = self.options.recovery
        self.surgeon = Surgeon(self.options.decomposition(), self.options.read_choices(), schedule)
        if schedule is not None and not self.surgeon.cuts:
            raise ConfigError("recovery is given, but nothing is decomposed.", "Give rank=, or leave recovery out.")
        self.coach = Coach(schedule, self.surgeon) if schedule is not None else None
        self.memory = MemoryStage(self.options)
        self.engine = StepRunner()
        self.monitor = Monitor()
        self.reporter = Reporter(self.options.verbose, self.surgeon, self.memory, self.engine, self.monitor)
        self._hook: Any = None
        self._choice: BudgetChoice | None = None
        self._random = Randomness()
        self._steps = 0
        self._served: tuple[ref[Trainer], ref[LightningModule]] | None = None

    @property
    def fit(self) -> BudgetFit | None:
        """What ``rank="auto"`` chose on this rank, and what it predicts; None where nothing was chosen."""
        return self._choice.fit if self._choice is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle is a new callback with the same arguments: it serves another run."""
        return {name: value for name, value in vars(self).items() if name not in _OF_ONE_RUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _serve(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin as new for another model; for the same one under another Trainer only the schedule begins again."""
        if self._served is not None:
            last_trainer, last_module = (served() for served in self._served)
            if last_module is not pl_module:
                self._begin()
            elif last_trainer is not trainer and self.coach is not None:
                self.coach.begin_again()
        self._served = ref(trainer), ref(pl_module)
        self._random = Randomness()

    @classmethod
    def from_checkpoint(cls, path: str | Path, **changes: Any) -> CTDRCallback:
        """The callback that wrote a checkpoint, following that checkpoint's choices.

        Args:
            path: A Lightning checkpoint of a run with this callback.
            changes: Arguments to be other than they were.

        Raises:
            CheckpointError: When the file cannot be read or was written without this callback.
        """
        state = read_state(CompleteFileIO().load_checkpoint(path), cls.__qualname__, STATE_VERSION)
        surgeon = Surgeon(None, None, None)
        surgeon.load(state.get("surgery"))
        return cls(**{**CallbackOptions.arguments(state.get("options")), "choices": surgeon.choices, **changes})

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Decompose, before optimizers exist and before any checkpoint is read."""
        if stage == "fit":
            self._serve(trainer, pl_module)
        if self._hook is None:
            self._hook = pl_module.register_load_state_dict_pre_hook(match_structure)
        if stage != "fit":
            return
        recovery, cuts = self.options.recovery, self.surgeon.cuts
        changes, untested = recovery is not None, self.options.allow_untested
        check_strategy(trainer.strategy, cuts=cuts, changes=changes, allow_untested=untested)
        check_callbacks(trainer, self, cuts=cuts, staged=recovery is not None and recovery.staged)
        check_compiled(pl_module, plans=self.options.plans_memory, distills=recovery is not None and recovery.distill)
        write_complete_files(trainer.strategy)
        if not is_sharded(trainer.strategy) and overrides(pl_module, "configure_model"):
            pl_module.configure_model()
        if cuts:
            self._cut(trainer, pl_module)

    def _decomposer(self, trainer: Trainer) -> TrainingData | None:
        """What decomposes by the training data, on every rank alike; None where that is not asked for."""
        if self.options.data != "train" or self.surgeon.choices is not None:
            return None
        automatic = self.options.fits_budget and self.options.choices is None
        self._choice = BudgetChoice(trainer, self.options) if automatic else None
        return self._choice or TrainingData(trainer)

    def _cut(self, trainer: Trainer, pl_module: LightningModule) -> None:
        coaching = [self.coach.as_now()] if self.coach is not None else []
        with all_or_nothing(layers_as_now(pl_module), self.surgeon.as_now(), *coaching):
            if self.coach is not None:
                self.coach.prepare(pl_module)
            self.surgeon.decide(pl_module, trainer.strategy, self._decomposer(trainer))
            if self.coach is not None:
                self.coach.cut_at_start(pl_module)
            else:
                self.surgeon.cut(pl_module, 1)
        self.reporter.fit = self.fit

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to train when nothing was decomposed; a checkpoint has been read by now."""
        if not is_sharded(trainer.strategy):
            self.surgeon.check()
        self.reporter.say_cut(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up the random state of a resumed run; recover from the cut of a fresh one; wrap the step."""
        self._random.train_start(trainer)
        if self.coach is not None:
            self.coach.train_start(trainer, pl_module)
        self._attach(trainer, pl_module)
        log_scalars(trainer, pl_module, self.reporter.facts(trainer, pl_module), on_epoch=True)
        self.engine.counting = peak_flops(trainer) is not None
        self.monitor.start()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cut, roll back, or change phase."""
        self._random.epoch_start(trainer)
        if self.coach is not None:
            self.engine.release()
            self.coach.epoch_start(trainer, pl_module)
            self._attach(trainer, pl_module)

    def _attach(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_compiled(pl_module):
            self.memory.prepare(trainer, pl_module)
        self.engine.session = self.memory.session
        self.engine.prepares = self.memory.make_ready
        self.engine.copies = self.memory.copies
        self.engine.tighten = self.memory.tighten if self.options.retry_on_oom else None
        if self.coach is not None:
            self.engine.around, self.engine.key = self.coach.around, self.coach.key
        self.engine.attach(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock; free what the step does not need."""
        self._steps = trainer.global_step
        self.engine.metering = self.monitor.meters_next(trainer) or self.memory.meters(trainer)
        self.monitor.batch_start()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The step's backward is over."""
        if pl_module.automatic_optimization:
            self.engine.backward_done()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and log at the trainer's interval."""
        measured = self.engine.batch_done()
        if measured is not None:
            self.memory.batch_measured(measured)
        stepped = trainer.global_step > self._steps
        self.monitor.batch_end(batch, stepped)
        if stepped:
            self.memory.step_done(trainer, measured)
            if self.coach is not None:
                self.coach.step_done()
        if self.monitor.due(trainer):
            values = self.reporter.interval(trainer, pl_module, batch)
            values |= self.coach.step_logs() if self.coach is not None else {}
            log_scalars(trainer, pl_module, values, on_step=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is not part of the step time, nor is what comes before it at the end of an epoch."""
        self.monitor.pause()
        if trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.is_last_batch:
            self._epoch_trained(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the metric that recovery goes by."""
        self.monitor.resume()
        if self.coach is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self.coach.validation_end(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop when recovered."""
        self._random.epoch_end(trainer)
        self.monitor.pause()
        self._epoch_trained(trainer, pl_module)
        self.monitor.resume()
        if self.coach is not None:
            log_scalars(trainer, pl_module, self.coach.logs(), on_epoch=True)
            self.coach.epoch_end(trainer)

    def _epoch_trained(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.coach is not None:
            self.engine.release()  # the module is copied; the next epoch wraps its step again
            self.coach.epoch_trained(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was found, apart from its layers."""
        self._random.release(trainer)
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release everything; the module stays usable. What ran out of memory is accounted for first."""
        if is_out_of_memory(exception):
            self.reporter.account(trainer, pl_module, exception)
        self._release()
        self._unhook()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Roll back a last stage that did not recover; say what became of the run."""
        if self.coach is not None:
            self.coach.fit_end(pl_module)
        self.reporter.close(trainer, pl_module, self.coach)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks back."""
        self._release()
        self._unhook()

    def _release(self) -> None:
        self.engine.release()
        self.memory.release()
        if self.coach is not None:
            self.coach.release()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)  # Lightning's, bound to the module, which would live as long as the callback

    @override
    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors: the choices, where recovery stands, the options."""
        state = {
            "version": STATE_VERSION,
            "options": self.options.to_dict(),
            "surgery": self.surgeon.to_dict(),
            "stepped": self.monitor.stepped,
        }
        if self.coach is not None:
            state["recovery"] = self.coach.state_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        own = read_state({"callbacks": {self.state_key: state_dict}}, self.state_key, STATE_VERSION)
        self.surgeon.load(own.get("surgery"))
        if self.surgeon.cuts and own["surgery"]["choices"] is None:
            return
        stepped = own.get("stepped")
        self.monitor.stepped = stepped if isinstance(stepped, int) else 0
        if self.coach is not None and "recovery" in own:
            self.coach.load_state_dict(own["recovery"])

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add every rank's random state, so that a resumed run draws what this one would have drawn."""
        checkpoint["callbacks"][self.state_key]["random"] = self._random.save(trainer)
        if factorized_names(pl_module):
            leave_note(checkpoint, trainer.strategy)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint that training cannot go on from, before any time is spent."""
        if trainer.state.fn != "fit":
            return
        state = read_state(checkpoint, self.state_key, STATE_VERSION)
        wished = self.surgeon.choices
        self.surgeon.load(state.get("surgery"), factorized_names(pl_module))
        decided = not self.surgeon.cuts or state["surgery"]["choices"] is not None
        if not decided:  # the run ended before its first cut, and its weights are the dense model's
            self.surgeon.cut(pl_module, self.coach.progress.stage if self.coach is not None else 1)
        if decided:
            self.reporter.resumed(wished, state.get("options"), self.options)
        self._random.load(trainer, state.get("random"), checkpoint, at_once=not decided)
