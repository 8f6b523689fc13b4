"""The numbers of a run, once a log interval. Nothing here waits for the device on every batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor

from ctdr_lightning.basics.units import GIB


class Monitor:
    """Counts batches and samples between log points; wall-clock time over an interval needs no synchronisation.

    The caller says when a batch or a validation begins and ends. Time spent in validation is not counted.

    Attributes:
        stepped: Batches after which an optimizer stepped, as Lightning's loggers count them.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._paused_s: float | None = None
        self._batches = 0
        self._samples = 0
        self._logged = 0
        self.stepped = 0

    def start(self) -> None:
        """Training begins: nothing is counted yet."""
        self._since_s, self._paused_s = None, None
        self._batches = self._samples = 0

    def batch_start(self) -> None:
        """A batch begins; the first one starts the clock."""
        if self._since_s is None:
            self._since_s = perf_counter()

    def batch_end(self, batch: Any, stepped: bool) -> None:
        """A batch is over; ``stepped``: whether an optimizer stepped in it."""
        self.stepped += stepped
        self._batches += 1
        self._samples += batch_size(batch)

    def pause(self) -> None:
        """Validation begins."""
        self._paused_s = perf_counter()

    def resume(self) -> None:
        """Validation is over."""
        if self._paused_s is not None and self._since_s is not None:
            self._since_s += perf_counter() - self._paused_s
        self._paused_s = None

    def meters_next(self, trainer: Any) -> bool:
        """Whether the coming step's peak has to be measured: a log point follows it, and no allocator keeps count."""
        every = trainer.log_every_n_steps
        if not every or trainer.barebones or trainer.strategy.root_device.type == "cuda":
            return False
        return (self.stepped + 1) % every == 0 or self.stepped == 0

    def due(self, trainer: Any) -> bool:
        """Whether the trainer's loggers take metrics at this batch."""
        every = trainer.log_every_n_steps
        if not every or trainer.barebones or self._batches == 0 or self.stepped == self._logged:
            return False
        return self.stepped % every == 0

    def interval(self, trainer: Any) -> dict[str, float]:
        """Step time in seconds and samples per second over all ranks since the last call; then counts anew."""
        now = perf_counter()
        taken_s = now - self._since_s if self._since_s is not None else 0.0
        values = {}
        if taken_s > 0 and self._batches:
            values["ctdr/step_time_s"] = taken_s / self._batches
            values["ctdr/samples_per_s"] = self._samples * trainer.world_size / taken_s
        self._since_s, self._batches, self._samples = now, 0, 0
        self._logged = self.stepped
        return values


def utilisation(trainer: Any, step_flops: int, step_time_s: float) -> dict[str, float]:
    """Share of the device's peak that the model's own operations use; empty where the peak is not known.

    Args:
        trainer: In training; its precision says which peak counts.
        step_flops: Forward and backward operations of a step, recomputation aside; 0 where they were not counted.
        step_time_s: Wall-clock time of a step.
    """
    if not step_flops or not step_time_s:
        return {}
    available = peak_flops(trainer)
    return {"ctdr/mfu": step_flops / step_time_s / available} if available else {}


def peak_flops(trainer: Any) -> float | None:
    """Operations per second that the device's maker promises for the trainer's precision; None where not known."""
    device = trainer.strategy.root_device
    if device.type == "cpu":
        return None
    kinds = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    dtype = next((kind for word, kind in kinds.items() if word in str(trainer.precision)), torch.float32)
    return get_available_flops(device, dtype)


def device_peaks(device: torch.device) -> dict[str, float]:
    """Peak of the CUDA allocator since the last call, in GiB; empty on other devices."""
    if device.type != "cuda":
        return {}
    peaks = {
        "ctdr/peak_memory_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "ctdr/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


def batch_size(batch: Any) -> int:
    """Length of the first tensor in a nested batch; 1 where there is none."""
    tensor = next(tensors_of(batch), None)
    return int(tensor.shape[0]) if tensor is not None and tensor.ndim else 1


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a nested batch, depth first; plain objects are looked into."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from (tensor for item in batch.values() for tensor in tensors_of(item))
    elif isinstance(batch, list | tuple):
        yield from (tensor for item in batch for tensor in tensors_of(item))
    elif hasattr(batch, "__dict__"):
        yield from tensors_of(vars(batch))
