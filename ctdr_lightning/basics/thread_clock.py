"""The clock that computing is timed with: where one thread computes, what others do meanwhile does not count."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

import torch


def now_s() -> float:
    """Seconds for differences: this thread's own where torch computes on one thread, else the wall clock's.

    On a machine whose two cores eight processes shared, wall times of one step spread by a factor of two, thread times
    by a tenth.
    """
    return computing_clock()()


def computing_clock() -> Callable[[], float]:
    """The clock that ``now_s`` reads at present."""
    return thread_time if torch.get_num_threads() == 1 else perf_counter
