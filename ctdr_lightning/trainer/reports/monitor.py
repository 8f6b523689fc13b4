"""The numbers of a run, once a log interval. Nothing here waits for the device on every batch."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ctdr_lightning.memory.guide.step_guide import MAX_DIVERGENCES
from ctdr_lightning.trainer.training_step.device import batch_size, peak_flops


@dataclass
class _Counted:
    """Batches of one kind, their samples, and their seconds where they were timed one by one."""

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0


class Monitor:
    """Counts batches and samples between log points; wall-clock time over an interval needs no synchronisation.

    The caller says when a batch or a validation begins and ends. Time spent in validation is not counted, nor that of
    batches that were recorded or planned, where there are others in the interval.

    Attributes:
        stepped: Batches after which an optimizer stepped, as Lightning's loggers count them.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._paused_s: float | None = None
        self._begun_s = 0.0
        self._usual, self._other = _Counted(), _Counted()
        self._logged = 0
        self._metering = self._usual_metered = False
        self.stepped = 0

    def start(self) -> None:
        """Training begins: nothing is counted yet."""
        self._since_s, self._paused_s = None, None
        self._usual, self._other = _Counted(), _Counted()

    def batch_start(self) -> None:
        """A batch begins; the first one starts the clock."""
        self._begun_s = perf_counter()
        if self._since_s is None:
            self._since_s = self._begun_s

    def batch_end(self, batch: Any, *, stepped: bool, usual: bool = True) -> None:
        """A batch is over.

        Args:
            batch: The batch.
            stepped: Whether an optimizer stepped in it.
            usual: Whether it was neither recorded nor planned.
        """
        self.stepped += stepped
        self._usual_metered = self._usual_metered or (usual and self._metering)
        counted = self._usual if usual else self._other
        counted.batches += 1
        counted.samples += batch_size(batch)
        if not usual:
            counted.seconds += perf_counter() - self._begun_s

    def pause(self) -> None:
        """Validation begins."""
        self._paused_s = perf_counter()

    def resume(self) -> None:
        """Validation is over."""
        if self._paused_s is not None and self._since_s is not None:
            self._since_s += perf_counter() - self._paused_s
        self._paused_s = None

    def meters_next(self, trainer: Any) -> bool:
        """Whether the coming step's peak has to be measured, as no allocator keeps count.

        It is before a log point, and in the first steps until one was neither recorded nor planned.
        """
        every = trainer.log_every_n_steps
        if not every or trainer.barebones or trainer.strategy.root_device.type == "cuda":
            return False
        first = self.stepped == 0 or not (self._usual_metered or self.stepped > MAX_DIVERGENCES + 1)
        self._metering = first or (self.stepped + 1) % every == 0
        return self._metering

    def due(self, trainer: Any) -> bool:
        """Whether the trainer's loggers take metrics at this batch."""
        every, counted = trainer.log_every_n_steps, self._usual.batches + self._other.batches
        if not every or trainer.barebones or counted == 0 or self.stepped == self._logged:
            return False
        return self.stepped % every == 0

    def interval(self, trainer: Any) -> dict[str, float]:
        """Step time in seconds and samples per second over all ranks since the last call; then counts anew."""
        now = perf_counter()
        taken_s = now - self._since_s if self._since_s is not None else 0.0
        counted = self._usual if self._usual.batches else self._other
        if counted is self._usual:
            taken_s -= self._other.seconds
        values = {}
        if taken_s > 0 and counted.batches:
            values["ctdr/step_time_s"] = taken_s / counted.batches
            values["ctdr/samples_per_s"] = counted.samples * trainer.world_size / taken_s
        self._since_s, self._usual, self._other = now, _Counted(), _Counted()
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
