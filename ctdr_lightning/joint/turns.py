"""Two real steps timed in turns, the one under its plan, so that a busy machine slows both alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.gpu_memory import counts, synchronize, watch_peak
from ctdr_lightning.basics.thread_clock import now_s
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.tape.tape import Tape
from ctdr_lightning.memory.values.live_bytes import PeakMeter

# Three pairs tell a step that is a tenth too slow on one thread; more are run while they take under two seconds.
_LEAST_PAIRS, _MOST_PAIRS, _ENOUGH_S = 3, 9, 2.0


@dataclass(frozen=True)
class Watched:
    """One run of a step.

    Attributes:
        peak_bytes: The largest memory above the start, new gradients included.
        diverged: Where the step differed from its plan, in words; empty where it did not.
        seconds: Time of the run; of a short step largely that of its watch.
    """

    peak_bytes: int
    diverged: str
    seconds: float


@dataclass(frozen=True)
class RealStep:
    """A training step that can be run: forward and backward of one batch.

    Args:
        model: Its gradients are freed before each run.
        forward: Gives the loss.
        plan: The tape's plan; None runs the step plainly.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    plan: Plan | None = None

    def run(self) -> str:
        """Run once; returns where the step differed from its plan, in words, empty where it did not."""
        for parameter in self.model.parameters():
            parameter.grad = None
        tape = Tape(self.plan) if self.plan is not None else None
        with tape or nullcontext():
            loss = self.forward()
        loss.backward()
        return tape.diverged if tape is not None else ""

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def seconds(self) -> float:
        """Time of one run."""
        return self._clocked()[1]

    def watched(self) -> Watched:
        """Run once, its memory counted."""
        for parameter in self.model.parameters():
            parameter.grad = None
        device = self._device
        if device.type == "cuda":
            before = watch_peak(device)
            diverged, seconds = self._clocked()
            return Watched(counts(device).allocated_peak - before.allocated, diverged, seconds)
        with PeakMeter() as meter:
            diverged, seconds = self._clocked()
        return Watched(meter.live.peak, diverged, seconds)

    def _clocked(self) -> tuple[str, float]:
        device = self._device
        synchronize(device)
        start_s = now_s(device.type)
        diverged = self.run()
        synchronize(device)
        return diverged, now_s(device.type) - start_s


@dataclass(frozen=True)
class Turns:
    """Results of pairs of runs.

    Attributes:
        first_s: Median seconds of the first step.
        second_s: Median seconds of the second.
        ratio: Median over pairs of second over first.
    """

    first_s: float
    second_s: float
    ratio: float


def in_turns(first: RealStep, second: RealStep) -> Turns:
    """Time two steps in turns, after one run of each to warm up.

    Args:
        first: The reference.
        second: The other.
    """
    first.run()
    second.run()
    pairs = [(first.seconds(), second.seconds()) for _ in range(_LEAST_PAIRS)]
    while len(pairs) < _MOST_PAIRS and sum(map(sum, pairs)) < _ENOUGH_S:
        pairs.append((first.seconds(), second.seconds()))
    firsts, seconds = zip(*pairs, strict=True)
    return Turns(median(firsts), median(seconds), median(b / a for a, b in pairs))
