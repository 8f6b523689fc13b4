"""Steps that benchmarks measure: plain, under a plan, with Adam; their true peaks, and their times in turns.

A peak on the CPU is the running sum of the profiler's allocation events, on a GPU its allocator's count.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

from ctdr_lightning.basics.torch_private import profiler_events
from ctdr_lightning.memory import Plan, Tape
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from ctdr_lightning.memory.values.tensors import storage_bytes

Run = Callable[[], None]
_KEEPING = {-1: 2**31 - 1, -2: 2**28, -3: 2**25}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Let the process keep what it frees, as a GPU's caching allocator does.

    Otherwise glibc gives memory back and takes it again within each step, which costs up to a tenth of it, more or less
    by what ran before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, n_bytes in _KEEPING.items():
            mallopt(option, n_bytes)


def cpu_peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes live on the CPU while ``run`` runs, above what was live at its start."""
    gc.collect()  # garbage from before that is freed meanwhile would count as less than nothing
    with memory_profiler() as profiler:
        run()
    events = [e for e in profiler_events(profiler) if e.name() == "[memory]"]
    on_cpu = [e for e in sorted(events, key=lambda e: e.start_ns()) if e.device_type() == DeviceType.CPU]
    return max(accumulate((e.nbytes() for e in on_cpu), initial=0))


def _gpu_peak_bytes(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def step_peak_bytes(net: nn.Module, run: Callable[[], object]) -> int:
    """Peak of a step above weights and inputs, new gradients included; run once before, so that caches are warm."""
    peak_bytes = _gpu_peak_bytes if next(net.parameters()).is_cuda else cpu_peak_bytes
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        run_peak = peak_bytes(run)
    net.zero_grad(set_to_none=True)
    return run_peak


def in_turns(
    runs: Sequence[Callable[[], object]],
    rounds: int,
    middle: Callable[[Iterable[float]], float] = median,
    *,
    warm_up: bool = False,
) -> list[tuple[float, float]]:
    """Seconds of each run by the clock and of this thread's processor time, over rounds in which all take turns.

    Args:
        runs: What is timed.
        rounds: How often.
        middle: Makes one number of a run's seconds.
        warm_up: Run a round before those that count.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in runs]
    for _ in range(rounds + warm_up):
        for run, found in zip(runs, taken, strict=True):
            wall_s, thread_s = perf_counter(), thread_time()
            run()
            found.append((perf_counter() - wall_s, thread_time() - thread_s))
    columns = [zip(*found[warm_up:], strict=True) for found in taken]
    return [(middle(walls), middle(threads)) for walls, threads in columns]


def guided(step: Callable[[], Tensor], made: Plan, **options: Any) -> Run:
    """A step's forward under a plan and its backward.

    Args:
        step: Gives the loss.
        made: The plan.
        options: Of the tape.
    """

    def run() -> None:
        with Tape(made, **options) as tape:
            loss = step()
        assert not tape.diverged, tape.diverged
        loss.backward()

    return run


@dataclass
class AdamStep:
    """A network with its Adam, stepped under a plan where there is one."""

    name: str
    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]
    plan: Plan | None = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-5)

    def step(self) -> None:
        """Forward, backward and Adam's step."""
        self.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if self.plan is None else Tape(self.plan):
            loss = self.loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()

    def state_bytes(self) -> int:
        """Adam's moments."""
        states = self.optimizer.state.values()
        return storage_bytes([t for state in states for t in state.values() if isinstance(t, Tensor)])

    def peak_bytes(self) -> int:
        """True peak of a step, what is there before it included."""
        self.step()
        self.optimizer.zero_grad(set_to_none=True)
        batch = [self.batch] if isinstance(self.batch, Tensor) else self.batch
        there = storage_bytes([*self.model.parameters(), *self.model.buffers(), *batch])
        return there + self.state_bytes() + cpu_peak_bytes(self.step)
