"""How long an op took: wall time on a CPU, events with one synchronisation in all on a GPU, a model for fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ctdr_lightning.basics.thread_clock import computing_clock
from ctdr_lightning.basics.torch_private import OpOverload

Timed = tuple[Any, float, int]


class Clock(Protocol):
    """Runs calls and times them."""

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        """Run a call; returns its result, its seconds (or an index into ``seconds()``) and its workspace in bytes."""
        ...

    def seconds(self, measured: float) -> float:
        """The true seconds behind what ``run`` returned, once the step is over."""
        ...


class CpuClock:
    """Time around each call, by the clock that ``now_s`` would choose when this one is made."""

    def __init__(self) -> None:
        self._now_s = computing_clock()

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        """Run a call and time it."""
        now_s = self._now_s
        start = now_s()
        out = func(*args, **kwargs)
        return out, now_s() - start, 0

    def seconds(self, measured: float) -> float:
        """Seconds are known at once on a CPU."""
        return measured


class CudaClock:
    """A pair of CUDA events around each call, read after one synchronisation; workspace from the allocator."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._synchronised = False

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        """Run a call between two events; the time returned is the pair's index."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start.record()
        out = func(*args, **kwargs)
        end.record()
        temp = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
        self._events.append((start, end))
        return out, float(len(self._events) - 1), temp

    def seconds(self, measured: float) -> float:
        """Elapsed time of the pair, after one synchronisation in all."""
        if not self._synchronised:
            torch.cuda.synchronize()
            self._synchronised = True
        start, end = self._events[int(measured)]
        return start.elapsed_time(end) / 1e3


class ModelClock:
    """Seconds from a model of a device; the call itself runs on fake tensors.

    Args:
        cost: From an op, its arguments and its result to seconds.
    """

    def __init__(self, cost: Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], float]) -> None:
        self._cost = cost

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        """Run a call and ask the model how long it would take."""
        out = func(*args, **kwargs)
        return out, self._cost(func, args, kwargs, out), 0

    def seconds(self, measured: float) -> float:
        """The model's answer."""
        return measured
