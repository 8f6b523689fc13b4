"""Measures the true peak of a whole training batch where no allocator keeps count: the step, and the optimizer's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ctdr_lightning.memory.values.live_bytes import PeakMeter, tell_trackers
from ctdr_lightning.trainer.training_step.resident import local_bytes


class BatchMeter:
    """Counts from before the forward until after the optimizer's step.

    Args:
        standing: What is in memory already: weights, buffers, optimizer state, the batch.
        passing: What may be freed meanwhile: gradients of batches before, copies that would put a failed step back.

    Attributes:
        peak_bytes: True peak of the batch, once it is over.
        rest_bytes: How far memory rose, after the backward, above where the backward left it.
    """

    def __init__(self, standing: Iterable[Tensor], passing: Iterable[Tensor]) -> None:
        self.peak_bytes = self.rest_bytes = 0
        self._standing_bytes = local_bytes(standing)
        self._step_bytes = self._level_bytes = 0
        self._in_backward = True
        self._meter = PeakMeter()
        self._meter.__enter__()
        tell_trackers(passing)

    def backward_done(self) -> None:
        """What follows is the rest of the batch: unscaling, clipping, the optimizer's step. Twice is once."""
        live = self._meter.live
        if self._in_backward:
            self._in_backward = False
            self._step_bytes, self._level_bytes = live.peak, live.now
            live.peak = live.now

    def done(self) -> None:
        """The batch is over."""
        self._meter.__exit__(None, None, None)
        live = self._meter.live
        self.peak_bytes = self._standing_bytes + max(self._step_bytes, live.peak)
        self.rest_bytes = max(live.peak - self._level_bytes, 0)
