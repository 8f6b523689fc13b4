"""Save a checkpoint when the cluster announces the end of the job, then let the launcher queue the job again."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from lightning import Callback, LightningModule, Trainer

from ctdr_lightning.basics.errors import ConfigError

_Handler = Callable[[int, FrameType | None], Any] | int | None


class PreemptionCheckpoint(Callback):
    """On a signal: finish the batch, save the training state, then call the handler that was there before.

    submitit's own handler resubmits the job and exits, but saves no training state; Lightning's saves and requeues by
    itself. This one joins the two: Lightning's checkpoint, submitit's queue. Nothing is saved inside the handler, which
    may interrupt the optimizer halfway: it only raises a flag that the end of the batch looks at, and the end of the
    training. A signal that comes in an epoch's last batch or its validation is seen after the next epoch's first batch,
    or when the training is over, so the launcher must leave time for a validation.

    Args:
        path: The checkpoint to write.
        signal_names: The signals that announce the end; submitit's is SIGUSR2, SLURM's own SIGTERM. The handler that
            the first of them had is the one that queues the job again.
        every_n_batches: How often ranks of a distributed run agree on whether one of them was signalled.

    Raises:
        ConfigError: When a signal has no such name.
    """

    def __init__(
        self, path: str, signal_names: Sequence[str] = ("SIGUSR2", "SIGTERM"), every_n_batches: int = 10
    ) -> None:
        super().__init__()
        self.path = path
        self.signal_numbers = [_number(name) for name in signal_names]
        self.every_n_batches = every_n_batches
        self._previous: dict[int, _Handler] = {}
        self._frame: FrameType | None = None
        self._signalled = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the flag-raising handler before the launcher's.

        Not earlier: after ``on_fit_start`` the trainer notes the handlers that it restores in the end.
        """
        self._previous = {number: signal.signal(number, self._raise_flag) for number in self.signal_numbers}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and hand over when any rank was signalled."""
        # After an epoch's last batch Lightning would resume with the next epoch, without this one's validation.
        if not trainer.is_last_batch and (trainer.world_size == 1 or batch_idx % self.every_n_batches == 0):
            self._save_if_signalled(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and hand over when a signal came in the last validation: the test is still to be done."""
        self._save_if_signalled(trainer)

    def _save_if_signalled(self, trainer: Trainer) -> None:
        if not self._agreed(trainer):
            return
        number, self._signalled = self._signalled, 0
        trainer.save_checkpoint(self.path)
        queues = self._previous.get(self.signal_numbers[0])
        if callable(queues):
            queues(self.signal_numbers[0], self._frame)
        elif number == signal.SIGTERM:
            sys.exit(128 + number)  # as it would have ended without us

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the launcher its signal back."""
        self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the launcher its signal back."""
        self._give_back()

    def _agreed(self, trainer: Trainer) -> bool:
        if trainer.world_size == 1:
            return bool(self._signalled)
        return trainer.strategy.reduce_boolean_decision(bool(self._signalled), all=False)

    def _give_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _raise_flag(self, signal_number: int, frame: FrameType | None) -> None:
        self._signalled = signal_number
        self._frame = frame


def _number(name: str) -> int:
    if name not in signal.Signals.__members__:
        raise ConfigError(f"signal_names: {name!r} is no signal.", "Write names such as SIGUSR2 or SIGTERM.")
    return int(signal.Signals[name])
