"""Measures the true peak of a whole training batch where no allocator keeps count: the step, and the optimizer's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.trainer.training_step.optimizer.resident import local_bytes
from ctdr_lightning.trainer.training_step.optimizer.rest_meter import RestMeter


class BatchMeter:
    """Counts from before the forward until after the optimizer's step.

    Args:
        standing: Tensors that are resident throughout: weights, buffers, the batch.
        passing: Tensors that may be freed meanwhile: gradients of earlier batches, optimizer state, copies for a retry.

    Attributes:
        peak_bytes: True peak of the batch, once it is over.
        rest_bytes: Rise of the memory after a backward, above its level at the end of the backward.
        rest_tensor_bytes: The same of tensors alone, without what kernels allocate and free again within a call.
        workspace_bytes: The most that one of these calls took.
        beside_bytes: Bytes that an optimizer had made when it ran another step of the batch, as its closure.
    """

    def __init__(self, standing: Iterable[Tensor], passing: Iterable[Tensor]) -> None:
        self.peak_bytes = self.rest_bytes = self.beside_bytes = 0
        self.rest_tensor_bytes = self.workspace_bytes = 0
        standing = tuple(standing)
        self._standing_bytes = local_bytes(standing)
        self._step_bytes = self._level_bytes = 0
        self._in_backward = True
        self._meter = self._step = PeakMeter()
        self._rest = RestMeter(self._step.live, watches=all(tensor.device.type == "cpu" for tensor in standing))
        self._meter.__enter__()
        self._meter.live.track(passing)  # others may count them as resident

    def backward_done(self) -> None:
        """The rest of the batch begins: unscaling, clipping, the optimizer's step. A second call has no effect."""
        live = self._meter.live
        if self._in_backward:
            self._in_backward = False
            self._step_bytes, self._level_bytes = max(self._step_bytes, live.peak), live.now
            live.peak = live.now
            self._go_on_with(self._rest)

    def _go_on_with(self, meter: PeakMeter) -> None:
        self._meter.__exit__(None, None, None)
        self._meter = meter
        meter.__enter__()

    def step_begins(self, passing: Iterable[Tensor]) -> None:
        """Another step of the same batch begins.

        Args:
            passing: As for the first step, at present.
        """
        live = self._meter.live
        live.track(passing := list(passing))
        self._rest_done()
        self._go_on_with(self._step)
        self.beside_bytes = max(self.beside_bytes, live.now - local_bytes(passing))

    def _rest_done(self) -> None:
        live = self._meter.live
        if not self._in_backward:
            peak_bytes = max(live.peak, self._rest.peak_bytes)
            self.rest_bytes = max(self.rest_bytes, peak_bytes - self._level_bytes)
            self.rest_tensor_bytes = max(self.rest_tensor_bytes, live.peak - self._level_bytes)
            self._step_bytes = max(self._step_bytes, peak_bytes)
            self._in_backward = True
            live.peak, self._rest.peak_bytes = live.now, 0

    def done(self) -> None:
        """The batch is over."""
        self._meter.__exit__(None, None, None)
        self._rest_done()
        self.workspace_bytes = self._rest.workspace_bytes
        self.peak_bytes = self._standing_bytes + max(self._step_bytes, self._meter.live.peak)
