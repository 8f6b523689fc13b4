"""Time of an op: wall time on a CPU, a model's for fakes. `CudaClock` times a GPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ctdr_lightning.basics.thread_clock import computing_clock
from ctdr_lightning.basics.torch_private import OpOverload

Timed = tuple[Any, float, int]


class Clock(Protocol):
    """Runs calls and times them."""

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        """Run a call; returns its result, its seconds or a negative number for ``seconds()``, and its workspace."""
        ...

    def seconds(self, measured: float) -> float:
        """The true seconds behind the result of ``run``, once the step is over."""
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
