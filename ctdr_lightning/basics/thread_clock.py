"""The clock for compute time: if a single thread computes, the work of other threads does not count.

A GPU is another that computes: its host's threads only wait.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

import torch


def now_s(device: str = "cpu") -> float:
    """Seconds for differences: this thread's own where torch computes on one thread, else the wall clock's.

    On a machine whose two cores eight processes shared, wall times of one step spread by a factor of two, thread times
    by a tenth.

    Args:
        device: Type of the device that computes.
    """
    return computing_clock(device)()


def computing_clock(device: str = "cpu") -> Callable[[], float]:
    """The clock that ``now_s`` reads at present."""
    return thread_time if device == "cpu" and torch.get_num_threads() == 1 else perf_counter
