"""Save a checkpoint when the cluster announces the end of the job, then let the launcher queue the job again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning import Callback, LightningModule, Trainer

_Handler = Callable[[int, FrameType | None], Any] | int | None


class PreemptionCheckpoint(Callback):
    """On a signal: finish the batch, save the training state, then call the handler that was there before.

    submitit's own handler resubmits the job and exits, but saves no training state; Lightning's saves and requeues by
    itself. This one joins the two: Lightning's checkpoint, submitit's queue. Nothing is saved inside the handler, which
    may interrupt the optimizer halfway: it only raises a flag that the end of the batch looks at. A run that is resumed
    within an epoch does the steps that were left of it, on freshly drawn batches.

    Args:
        path: The checkpoint to write.
        signal_name: The signal the launcher sends; submitit's default is SIGUSR2.
        every_n_batches: How often ranks of a distributed run agree on whether one of them was signalled.
    """

    def __init__(self, path: str, signal_name: str = "SIGUSR2", every_n_batches: int = 10) -> None:
        super().__init__()
        self.path = path
        self.signal_number = signal.Signals[signal_name]
        self.every_n_batches = every_n_batches
        self._previous: _Handler = None
        self._frame: FrameType | None = None
        self._signalled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the flag-raising handler before the launcher's.

        Not earlier: after ``on_fit_start`` the trainer notes the handlers that it restores in the end.
        """
        self._previous = signal.signal(self.signal_number, self._raise_flag)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and hand over when any rank was signalled."""
        if not self._agreed(trainer, batch_idx):
            return
        self._signalled = False
        trainer.save_checkpoint(self.path)
        if callable(self._previous):
            self._previous(self.signal_number, self._frame)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the launcher its signal back."""
        self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the launcher its signal back."""
        self._give_back()

    def _agreed(self, trainer: Trainer, batch_idx: int) -> bool:
        if trainer.world_size == 1:
            return self._signalled
        if batch_idx % self.every_n_batches:
            return False
        return trainer.strategy.reduce_boolean_decision(self._signalled, all=False)

    def _give_back(self) -> None:
        if self._previous is not None:
            signal.signal(self.signal_number, self._previous)
            self._previous = None

    def _raise_flag(self, signal_number: int, frame: FrameType | None) -> None:
        self._signalled = True
        self._frame = frame
