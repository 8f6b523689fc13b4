"""The callback: Lightning's hooks, each one call of the fit's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from ctdr_lightning.basics.checks import from_mapping, named_arguments
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.recovery import Recovery
from ctdr_lightning.trainer.checkpoints import read_entries, write_complete_files
from ctdr_lightning.trainer.fit_run import FitRun
from ctdr_lightning.trainer.groups import Memory, Ranks, changed
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.run_state import RunState

RankValue = float | int | str


class CTDRCallback(Callback):
    """Decompose a model, run its steps under a memory budget, and recover its accuracy.

    Args:
        memory_budget: Bytes a step may take: ``"8GiB"``, a number, or a fraction of the device's memory
            (``0.8``, ``"80%"``).
        rank: Share of parameters that all layers together keep (float), a rank (int), ``"vbmf"``, ``"error=0.05"``,
            ``"energy=0.99"``, or a mapping from layer pattern to any of these, where a float is each layer's own share;
            ``"auto"`` chooses ranks and plan together for ``memory_budget``; ``"if_needed"`` does so only where the
            dense model under an exact plan does not fit the budget or takes over 1.25 of its own time, and decomposes
            nothing without a budget or beside ``policy``, ``offload`` and ``sub_batches``; None decomposes nothing.
        select: Patterns of the layers to decompose (``"features.*"``); ``!`` leaves out; None takes all.
        max_slowdown: Without a budget, and where ranks are chosen for one: how long a step may take, in steps of the
            dense model. None is 1.0 (``"if_needed"``: 1.25); with a budget it yields to accuracy.
        policy: Name of the memory policy. Without a budget ``"auto"`` makes the peak as small as it can be in no more
            than the dense model's time, and ``"keep"`` plans nothing.
        recovery: True for the default schedule, a `Recovery`, its fields, or a YAML file; None for no recovery.
        ranks: How ranks are chosen: `Ranks`, or a mapping to its fields.
        memory: Further means to keep the budget, such as offloading: `Memory`, or a mapping to its fields.
        verbose: Print the decomposition and the plans.

    Attributes:
        options: The arguments.
        run: State of the present fit: surgeon, coach, memory and the like.

    Raises:
        ConfigError: If an argument cannot be used.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[CTDRCallback(rank=0.5, recovery=True)], logger=False)
    """

    @named_arguments(ranks=Ranks, memory=Memory)
    def __init__(
        self,
        memory_budget: int | float | str | None = None,
        rank: RankValue | dict[str, RankValue] | None = "if_needed",
        *,
        select: str | list[str] | None = None,
        max_slowdown: float | None = None,
        policy: str = "auto",
        recovery: Recovery | dict[str, Any] | str | bool | None = None,
        ranks: Ranks | dict[str, Any] | None = None,
        memory: Memory | dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        self.options = CallbackOptions(
            **vars(from_mapping(Ranks, {} if ranks is None else ranks, "ranks")),
            **vars(from_mapping(Memory, {} if memory is None else memory, "memory")),
            memory_budget=memory_budget,
            rank=rank,
            select=select,
            max_slowdown=max_slowdown,
            policy=policy,
            recovery=Recovery.read(recovery),
            verbose=verbose,
        )
        self.run = FitRun(self.options)

    @property
    def fit(self) -> BudgetFit | None:
        """The choice of ``rank="auto"`` on this rank, and its predictions; None without a choice."""
        return self.run.budget_fit

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle is a new callback with the same arguments: it serves another run."""
        return {name: value for name, value in vars(self).items() if name not in ("run", "log", "log_dict")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.run = FitRun(self.options)

    @classmethod
    def from_checkpoint(cls, path: str | Path, **changes: Any) -> CTDRCallback:
        """The callback that wrote a checkpoint, following that checkpoint's choices.

        Args:
            path: A Lightning checkpoint of a run with this callback; a folder, if its processes wrote shards.
            changes: Arguments to be other than they were; of ``ranks`` and ``memory`` a mapping changes single fields.

        Raises:
            CheckpointError: If the file cannot be read or was written without this callback.
        """
        state = RunState.of_checkpoint(read_entries(path), cls.__qualname__)
        followed = {"ranks": {"choices": state.surgery.choices}}
        return cls(**changed(changed(CallbackOptions.arguments(state.options), followed), changes))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Decompose, before optimizers exist and before any checkpoint is read; another model is another run's."""
        if stage != "fit":
            write_complete_files(trainer.strategy)
            self.run.follow_structure(pl_module)
            return
        if not self.run.serves(pl_module):
            self.run = FitRun(self.options)
        try:
            self.run.setup(trainer, pl_module, self)
        except InfeasibleBudgetError as error:
            self.run.teardown()
            self.run = FitRun.by_other_means(self.options, trainer, pl_module, error)
            self.run.setup(trainer, pl_module, self)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to train when nothing was decomposed."""
        self.run.on_fit_start(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up a resumed run; recover from the cut of a fresh one; wrap the step."""
        self.run.on_train_start(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Cut, roll back, or change phase."""
        self.run.on_train_epoch_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self.run.on_train_batch_start(trainer)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The step's backward is over."""
        self.run.on_after_backward(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and log at the trainer's interval."""
        self.run.on_train_batch_end(trainer, pl_module, batch)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the epoch's training where it is over; validation is not part of the step time."""
        self.run.on_validation_start(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the metric that recovery goes by."""
        self.run.on_validation_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop when recovered."""
        self.run.on_train_epoch_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was found, apart from its layers."""
        self.run.on_train_end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release everything; the module stays usable."""
        self.run.on_exception(trainer, pl_module, exception)
        self._forget_logging()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Roll back a last cut that did not recover; say what became of the run."""
        self.run.on_fit_end(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks back."""
        self.run.teardown()
        self._forget_logging()

    def _forget_logging(self) -> None:
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)  # Lightning's, bound to the module, which would live as long as the callback

    @override
    def state_dict(self) -> dict[str, Any]:
        """State of the run for a checkpoint, in primitives and tensors."""
        return self.run.state().to_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the output of :meth:`state_dict`."""
        self.run.take_up(RunState.from_dict(state_dict))

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add every rank's random state, so that a resumed run draws the same numbers."""
        checkpoint["callbacks"][self.state_key]["random"] = self.run.randomness.save(trainer)
        self.run.on_save_checkpoint(trainer, pl_module, checkpoint)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint that training cannot go on from, before any time is spent."""
        if trainer.state.fn == "fit":
            state = RunState.of_checkpoint(checkpoint, self.state_key)
            self.run.on_load_checkpoint(trainer, pl_module, state, checkpoint)
