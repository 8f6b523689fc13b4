"""Carries the schedule out: cuts, re-estimates, freezes, scales, rolls back, at epoch boundaries and nowhere else.

Every decision is taken when an epoch begins, from state that the checkpoint of the epoch before holds; BatchNorm is
re-estimated when an epoch's last step is done. So a checkpoint always holds the model that was validated, and a resumed
run repeats the decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.basics.interrupts import interrupts_held
from ctdr_lightning.memory.tape.module_paths import is_fsdp_unit
from ctdr_lightning.recovery.batchnorm import tracked
from ctdr_lightning.recovery.decisions import Progress, failed, first_cut_epoch, next_move, observed, phase_at
from ctdr_lightning.recovery.distill import Teacher
from ctdr_lightning.recovery.phases import Freezer, RateScaler
from ctdr_lightning.recovery.schedule import Phase, Recovery
from ctdr_lightning.recovery.transaction import PutBack, all_or_nothing, layers_as_now
from ctdr_lightning.trainer.accuracy import optimizers, rehearsal
from ctdr_lightning.trainer.accuracy.batchnorm_pass import Estimator
from ctdr_lightning.trainer.accuracy.training_data import TrainingData
from ctdr_lightning.trainer.accuracy.validation import logged_metric, measure
from ctdr_lightning.trainer.shards import ShardedCopies, shard_to_listen, show_shards
from ctdr_lightning.trainer.strategies import rewrap, unwrap
from ctdr_lightning.trainer.structure import match_structure
from ctdr_lightning.trainer.surgeon import Surgeon


class Coach:
    """Wins the accuracy back.

    Args:
        recovery: The schedule.
        surgeon: Cuts the layers.
        verbose: Whether to print its actions.
    """

    def __init__(self, recovery: Recovery, surgeon: Surgeon, verbose: bool = True) -> None:
        self.recovery = recovery
        self._verbose = verbose
        self.surgeon = surgeon
        self.progress = Progress()
        self.teacher: Teacher | None = None
        self.rates = RateScaler()
        self._freezer = Freezer()
        self._dense: nn.Module | None = None
        self._snapshot: dict[str, Any] | None = None
        self._estimator = Estimator(recovery.batchnorm_batches)
        self._whole_teacher: LightningModule | None = None

    @property
    def cuts_at_start(self) -> bool:
        """Whether the first stage is cut before training."""
        return first_cut_epoch(self.recovery) == 0

    def begin_again(self) -> None:
        """Follow the schedule from its start, with the layers that are cut already."""
        self.progress = Progress(stage=self.progress.stage, reference=self.progress.reference)
        self._snapshot = None

    def prepare(self, module: LightningModule, *, sharded: bool = False) -> None:
        """Keep the later needed parts of the dense model, before anything is cut.

        Args:
            module: Dense.
            sharded: Whether ``configure_model`` will shard it.

        Raises:
            ConfigError: If the layers were cut before this run, and the dense model is needed.
        """
        if self.surgeon.adopted and self.progress.stage == 0:
            self._check_without_dense()
            self.progress.stage = 1
        if self.progress.stage > 0:
            return
        if self.recovery.distill is not None and sharded and self.recovery.distill.keep != "host":
            self._whole_teacher = duplicate(module)
            self.teacher = Teacher(self._whole_teacher, self.recovery.distill, copied=False)
        elif self.recovery.distill is not None:
            self.teacher = Teacher(module, self.recovery.distill)
        if self.cuts_at_start and self.recovery.reference == "measure":
            self._dense = duplicate(module)
        if self.cuts_at_start and self.recovery.max_drop is not None:
            self._snapshot = {"model": _host_state(module), "optimizers": []}

    def _check_without_dense(self) -> None:
        needs = "distill" if self.recovery.distill is not None else "reference"
        if self.recovery.distill is not None or self.recovery.reference == "measure":
            raise ConfigError(
                f"recovery.{needs} needs the dense model, but the model's layers are cut already.",
                "Make the model anew, or call merge(model) before fit, which makes its layers dense.",
            )

    def cut_at_start(self, module: LightningModule) -> None:
        """Cut the first stage, before there is an optimizer; nothing where it comes later or was cut."""
        self.progress.stages = len(self.surgeon.stages)
        if self.cuts_at_start and self.progress.stage == 0:
            self.progress.stage = 1
            self.surgeon.cut(module, 1)

    def before_shards(self, module: LightningModule) -> None:
        """Keep what copies are made from of a model that is cut and about to be sharded; nothing on a further fit."""
        if self.recovery.batchnorm_batches and tracked(module) and not any(map(is_fsdp_unit, module.modules())):
            self._estimator = Estimator(self.recovery.batchnorm_batches, ShardedCopies(module))

    def train_start(self, trainer: Any, module: LightningModule) -> None:
        """Measure and re-estimate after the first cut, in a fresh run; take up the phase, in a resumed one."""
        fresh = self.progress.entered_epoch < 0
        if self._whole_teacher is not None:  # a checkpoint's weights have been loaded into it by now
            shard_to_listen(self._whole_teacher, module)
            self._whole_teacher = None
        self._check_schedule(trainer)
        if isinstance(self.recovery.reference, int | float):
            self.progress.reference = float(self.recovery.reference)
        if fresh and self.progress.stage > 0:
            self._measure_reference(trainer, self._dense)
            self._settle(trainer, module)
        self._dense = None
        self.rates.attach(trainer.optimizers)
        if not fresh:
            self._enter(trainer, module, self.progress.entered_epoch)
            self._stop_if_recovered(trainer, self.progress.entered_epoch + 1)

    def epoch_start(self, trainer: Any, module: LightningModule) -> None:
        """Decide and carry out the move before this epoch, once and completely; Ctrl-C meanwhile changes nothing."""
        epoch = trainer.current_epoch
        if epoch <= self.progress.entered_epoch:
            return
        progress = self._observed(trainer, module)
        move = next_move(self.recovery, progress, epoch, epochs_of(trainer))
        with all_or_nothing(*self._as_now(trainer, module, with_weights=move == "roll back")):
            self.progress = progress
            if move == "roll back":
                self._roll_back(trainer, module)
            elif move == "cut":
                self._cut(trainer, module, epoch)
            _, spent = phase_at(self.recovery, self.progress, epoch)
            if spent == 0:
                self.progress.phase_steps = 0
            self._enter(trainer, module, epoch)
            self.progress.entered_epoch = epoch

    def _observed(self, trainer: Any, module: LightningModule) -> Progress:
        """The progress with the spectra of this moment, rank 0's, where the first cut waits for them."""
        if not self.recovery.warms_up or self.progress.stage > 0 or self.progress.rolled_back:
            return replace(self.progress)
        strategy = trainer.strategy
        return observed(
            self.progress, strategy.broadcast(self.surgeon.stable_ranks(module) if strategy.is_global_zero else None)
        )

    def as_now(self) -> PutBack:
        """Remember the progress of the recovery; the result restores it."""
        progress, teacher, dense, snapshot = replace(self.progress), self.teacher, self._dense, self._snapshot

        def put_back() -> None:
            self.progress, self.teacher, self._dense, self._snapshot = progress, teacher, dense, snapshot

        return put_back

    def _as_now(self, trainer: Any, module: LightningModule, with_weights: bool) -> list[PutBack]:
        weights = _host_state(module) if with_weights else None

        def put_back_training() -> None:
            if weights is not None:
                module.load_state_dict(weights)
            unwrap(trainer)
            self.rates.attach(trainer.optimizers)

        return [layers_as_now(module), optimizers.as_now(trainer), self.as_now(), put_back_training]

    def step_done(self) -> None:
        """An optimizer step was taken."""
        self.progress.phase_steps += 1
        self.rates.steps = self.progress.phase_steps

    def epoch_trained(self, trainer: Any, module: LightningModule) -> None:
        """Re-estimate BatchNorm with the weights that an epoch ended with, once, before they are judged or saved."""
        if self.progress.stage > 0 and self.progress.estimated_epoch != trainer.current_epoch:
            self._estimator.run(trainer, module)
            self.progress.estimated_epoch = trainer.current_epoch

    def validation_end(self, trainer: Any) -> None:
        """Read the monitored metric, the same on every rank.

        Raises:
            ConfigError: If it was not logged.
        """
        if self.recovery.monitor is None:
            return
        value = logged_metric(trainer.callback_metrics, self.recovery.monitor).float()
        self.progress.metric = float(rehearsal.mean_over_ranks(trainer, value.to(trainer.strategy.root_device)))

    def epoch_end(self, trainer: Any) -> None:
        """Stop when the last stage has recovered."""
        self._stop_if_recovered(trainer, trainer.current_epoch + 1)

    def fit_end(self, module: LightningModule) -> None:
        """Roll back a last stage that training ended with and that did not recover."""
        if self._snapshot is not None and not self.progress.rolled_back and failed(self.recovery, self.progress):
            with interrupts_held():
                self._put_back_weights(module)

    def release(self) -> None:
        """Let everything train at its own rate again."""
        self.rates.release()
        self._freezer.thaw()
        if self.progress.reference is not None:
            self._dense = None  # else an interrupt came before the measurement, which the next fit makes up for

    @property
    def around(self) -> Callable[..., Any] | None:
        """Wrapper of a training step: the teacher, or None."""
        return self.teacher.around if self.teacher is not None else None

    @property
    def key(self) -> tuple[int, float]:
        """Key that distinguishes steps of equal shapes: the stage and the learning rate's scale."""
        return self.progress.stage, self.rates.scale

    def step_logs(self) -> dict[str, Any]:
        """The teacher's cost and its share of the loss; the same names on every rank."""
        return self.teacher.logs() if self.teacher is not None else {}

    def logs(self) -> dict[str, float]:
        """Progress of the recovery, for the loggers; the same names on every rank."""
        progress = self.progress
        found = {
            "metric": progress.metric,
            "metric_dense": progress.reference,
            "metric_raw": progress.raw,
            "metric_batchnorm": progress.batchnorm,
            "stage": progress.stage,
            "lr_scale": self.rates.factor,
        }
        return {f"ctdr/{name}": float(value) for name, value in found.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors."""
        state: dict[str, Any] = {"progress": self.progress.to_dict()}
        if self.teacher is not None:
            state["teacher"] = self.teacher.state_dict()
        if self._snapshot is not None:
            state["snapshot"] = self._snapshot
        return state

    def load_state_dict(self, state: Any) -> None:
        """Restore the output of `state_dict`.

        Raises:
            CheckpointError: If it is something else.
        """
        if not isinstance(state, dict):
            raise CheckpointError("The checkpoint's recovery state is damaged.", "Use an earlier checkpoint.")
        self.progress = Progress.from_dict(state.get("progress"))
        self._snapshot = _read_snapshot(state.get("snapshot"))
        if self.teacher is not None and "teacher" in state:
            self.teacher.load_state_dict(state["teacher"])

    def _say(self, text: str) -> None:
        if self._verbose:
            rank_zero_info(f"CTDR: {text}")

    def _check_schedule(self, trainer: Any) -> None:
        warm = any(phase.warmup_epochs for phase in self.recovery.phases)
        if warm and math.isinf(trainer.num_training_batches):
            raise ConfigError(
                "phase.warmup_epochs needs to know how long an epoch is, but the training data has no length.",
                "Set Trainer(limit_train_batches=...), or warmup_epochs=0.",
            )

        if self.recovery.warms_up and epochs_of(trainer) == 1:
            raise ConfigError(
                'recovery.cut_epochs="auto" cuts after a dense epoch, but the run has one epoch in all.',
                "Train for two epochs or more, or leave cut_epochs out: all layers are then cut at the start.",
            )

    def _measure_reference(self, trainer: Any, dense: nn.Module | None) -> None:
        if self.recovery.reference == "measure" and dense is not None:
            self.progress.reference = measure(trainer, dense, str(self.recovery.monitor))
            self._say(f"dense {self.recovery.monitor} {self.progress.reference:.4f}")

    def _cut(self, trainer: Any, module: LightningModule, epoch: int) -> None:
        self._freezer.thaw()
        if self.progress.stage == 0:
            self._measure_reference(trainer, module)
        if self.recovery.max_drop is not None:
            self._snapshot = {"model": _host_state(module), "optimizers": optimizers.snapshot(trainer.optimizers)}
        self.progress.stage += 1
        self.progress.stage_epoch, self.progress.metric = epoch, None
        if self.recovery.warms_up:
            self._choose_warm(trainer, module, epoch)
        self.surgeon.cut(module, self.progress.stage)
        self._rebuild(trainer)
        self._settle(trainer, module)
        self._say(f"stage {self.progress.stage} of {self.progress.stages} cut before epoch {epoch}")

    def _choose_warm(self, trainer: Any, module: LightningModule, epoch: int) -> None:
        """Choose ranks by the weights, and where possible the training data, of this moment."""
        # only rank 0 runs steps: statistics that it asks the others for would never come
        alone = trainer.world_size == 1 or not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())
        data = TrainingData(trainer) if self.surgeon.by_data and alone else None
        if not self.surgeon.decide_warm(module, trainer.strategy, data):
            rank_zero_warn(f"CTDR: no layer is worth a cut before epoch {epoch}; all stay dense. See rank=.")
        elif self.surgeon.report is not None:
            self._say(f"\n{self.surgeon.report}")

    def _settle(self, trainer: Any, module: LightningModule) -> None:
        """Re-estimate BatchNorm, and measure before and after where the user lets us."""
        measuring = self.recovery.reference == "measure"
        monitor = str(self.recovery.monitor)
        self.progress.raw = measure(trainer, module, monitor) if measuring else None
        used = self._estimator.run(trainer, module)
        self.progress.batchnorm = measure(trainer, module, monitor) if measuring and used else self.progress.raw

    def _roll_back(self, trainer: Any, module: LightningModule) -> None:
        assert self._snapshot is not None
        self._freezer.thaw()
        states = self._snapshot["optimizers"]
        self._put_back_weights(module)
        self._rebuild(trainer)
        optimizers.put_back(trainer.optimizers, states)

    def _put_back_weights(self, module: LightningModule) -> None:
        assert self._snapshot is not None
        match_structure(module, self._snapshot["model"])
        module.load_state_dict(self._snapshot["model"])
        self._say(
            f"stage {self.progress.stage} rolled back: {self.recovery.monitor} {self.progress.metric:.4f}, "
            f"dense {self.progress.reference:.4f}"
        )
        self.progress.stage -= 1
        self.progress.rolled_back, self._snapshot = True, None

    def _rebuild(self, trainer: Any) -> None:
        optimizers.rebuild(trainer)
        rewrap(trainer)
        self.rates.attach(trainer.optimizers)

    def _enter(self, trainer: Any, module: LightningModule, epoch: int) -> None:
        phase = phase_at(self.recovery, self.progress, epoch)[0] or Phase()
        show_shards(module)
        if self._freezer.freeze(module, phase.train):
            rewrap(trainer)
        steps = 0.0
        if phase.warmup_epochs:
            steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches) * phase.warmup_epochs
        self.rates.scale, self.rates.warmup_steps = phase.lr_scale, round(steps)
        self.rates.steps = self.progress.phase_steps

    def _stop_if_recovered(self, trainer: Any, epoch: int) -> None:
        if next_move(self.recovery, self.progress, epoch) == "stop":
            self._say(f"recovered, {self.recovery.monitor} {self.progress.metric:.4f}; training stops")
            trainer.should_stop = True


def epochs_of(trainer: Any) -> int | None:
    """Epochs of a run, from its limit of epochs or of steps; None where there is neither."""
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        return int(trainer.max_epochs)
    if trainer.max_steps <= 0 or math.isinf(trainer.num_training_batches):
        return None
    return math.ceil(trainer.max_steps * trainer.accumulate_grad_batches / trainer.num_training_batches)


def _read_snapshot(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    model = value.get("model") if isinstance(value, dict) else None
    states = value.get("optimizers") if isinstance(value, dict) else None
    good = isinstance(model, dict) and all(isinstance(name, str) for name in model)
    if not good or not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise CheckpointError("The checkpoint's snapshot for a rollback is damaged.", "Use an earlier checkpoint.")
    return {"model": model, "optimizers": states}


def _host_state(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
