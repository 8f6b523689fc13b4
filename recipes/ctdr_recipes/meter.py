"""A callback that measures the training steps of a Trainer: the time of each, the memory of one."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lightning import Callback, LightningModule, Trainer

from ctdr_recipes.measure import MemoryProfile, MemoryUse, training_tensors


class StepMeter(Callback):
    """Times training batches, from their start to their end; with ``profile`` it watches the memory of the last one.

    Put it first in the trainer's callbacks, so that what the others do is measured too.

    Args:
        first_batch: Batches before this one are not counted: they record and plan.
        n_batches: Batches that are counted; the epoch must be long enough.
        profile: Watch the memory of the last of them, and time none: the profiler slows them down.
    """

    def __init__(self, first_batch: int, n_batches: int, profile: bool = False) -> None:
        super().__init__()
        self.first_batch = first_batch
        self.last_batch = first_batch + n_batches - 1
        self.seconds: list[float] = []
        self.memory: MemoryUse | None = None
        self._profile = MemoryProfile() if profile else None
        self._start_s = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock, or the profiler one batch ahead of the one it reports."""
        if self._profile is not None and batch_idx == self.last_batch - 1:
            self._profile.start()
        if self._profile is not None and batch_idx == self.last_batch:
            self._profile.mark()
        self._start_s = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the time, or what the profiler saw."""
        taken_s = perf_counter() - self._start_s
        if self._profile is None and self.first_batch <= batch_idx <= self.last_batch:
            self.seconds.append(taken_s)
        if self._profile is not None and batch_idx == self.last_batch:
            self.memory = self._profile.stop([*training_tensors(pl_module, trainer.optimizers[0]), *batch])
