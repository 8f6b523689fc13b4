"""Measured cost of a step: the allocator's bytes over time, and seconds, with several steps compared in turns.

``simulate`` predicts, this measures. The source of the bytes is the ``[memory]`` events of ``torch.profiler``: every
allocation and release, temporaries of the kernels included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ctdr_lightning.basics.torch_private import profiler_events
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from ctdr_lightning.memory.values.tensors import storage_bytes

_MARK = "ctdr::measured_step"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Live bytes over one step.

    Attributes:
        seconds: Time of each allocation or release, from the start of the step, which ran slower for being profiled.
        live_bytes: Live bytes after each of them.
    """

    seconds: tuple[float, ...]
    live_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at once."""
        return max(self.live_bytes)

    def lasting(self, seconds: float) -> MemoryUse:
        """Return the same step drawn to another duration, such as the one measured without the profiler."""
        stretch = seconds / self.seconds[-1]
        return MemoryUse(tuple(when * stretch for when in self.seconds), self.live_bytes)


class MemoryProfile:
    """Watches the CPU allocator from ``start`` to ``stop`` and reports the events after ``mark``.

    Let one whole step pass between ``start`` and ``mark``: the profiler cannot see the release of tensors that
    were allocated before it started, such as the gradients of the step before.
    """

    def __init__(self) -> None:
        self._profiler = memory_profiler()

    def start(self) -> None:
        """Begin to watch."""
        gc.collect()
        self._profiler.start()

    def mark(self) -> None:
        """Begin the reported part."""
        with record_function(_MARK):
            pass

    def stop(self, remaining: Iterable[Tensor]) -> MemoryUse:
        """Stop watching.

        Args:
            remaining: The tensors alive now: weights, gradients, optimizer state, the batch. They fix the level of the
                curve, of which the profiler knows only the ups and downs.

        Returns:
            Live bytes from ``mark`` to here.
        """
        self._profiler.stop()
        events = profiler_events(self._profiler)
        start_ns = next(event.start_ns() for event in events if event.name() == _MARK)
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and _on_cpu(e))
        levels = list(accumulate(n_bytes for _, n_bytes in changes))
        base = storage_bytes(remaining) - levels[-1]
        curve = [(when, base + level) for (when, _), level in zip(changes, levels, strict=True) if when >= start_ns]
        return MemoryUse(tuple((when - start_ns) / 1e9 for when, _ in curve), tuple(level for _, level in curve))


def measure_memory(step: Callable[[], object], remaining: Callable[[], Iterable[Tensor]]) -> MemoryUse:
    """Measure the live bytes over a step on the CPU.

    Args:
        step: Runs one whole step: forward, backward, and the optimizer where it is to be counted. It runs twice.
        remaining: The tensors alive after a step.

    Returns:
        Live bytes over the second run.
    """
    watched = MemoryProfile()
    watched.start()
    step()
    watched.mark()
    step()
    return watched.stop(remaining())


def measure_seconds(steps: Mapping[str, Callable[[], object]], rounds: int = 10) -> dict[str, float]:
    """Time several steps in turns on one thread, so that a busy machine slows all of them alike.

    Args:
        steps: The steps by name.
        rounds: How often each one runs, after one run to warm up.

    Returns:
        The median seconds of each step.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    with one_thread():
        for round_number in range(rounds + 1):
            for name, step in steps.items():
                start = perf_counter()
                step()
                if round_number:
                    taken[name].append(perf_counter() - start)
    return {name: median(seconds) for name, seconds in taken.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block on one torch thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield weights, buffers, gradients and optimizer state: the tensors that stay in memory between two steps."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _on_cpu(event: Any) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CPU
