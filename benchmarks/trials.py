"""Time of one trial of the simulator, against the ops of the step and the size of the group that it changes.

A trial asks what one value's change would do to bytes and seconds. It is timed on transformers of growing depth: a
value is dropped in the middle of a row of dropped ones, so that a group of so many is played for the first time.
Microseconds are process time, the median of ``N_TRIALS``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import Benchmark, pivot
from benchmarks.nets import transformer
from ctdr_lightning.memory import RECOMPUTE, Prepared, Simulator, record_fake

GROUPS = (1, 10, 30, 100, 300)
N_TRIALS = 25


@dataclass(frozen=True)
class Figure:
    """Trials that drop ``group`` values in a row in one step; ``work`` is in the units of a search's allotment."""

    n_ops: int
    group: int
    trial_us: float
    work: float


def measure(step: Prepared, group: int) -> Figure:
    """Time the drop that joins ``group`` values to one group, at places spread over the forward."""
    values = sorted(v for v in step.trace.saved if v in step.trace.droppable)
    seconds, work = [], []
    for place in range(N_TRIALS):
        first = place * (len(values) - group) // N_TRIALS
        row = values[first : first + group]
        last = row.pop(group // 2)
        simulator = Simulator(step, dict.fromkeys(row, RECOMPUTE))
        before, start_s = simulator.work, time.process_time()
        simulator.trial({last: RECOMPUTE})
        seconds.append(time.process_time() - start_s)
        work.append(simulator.work - before)
    return Figure(len(step.trace.ops), group, 1e6 * median(seconds), median(work))


def figures(*, layers: Sequence[int] = (8, 32, 100)) -> Iterator[Figure]:
    """Every group size that each net has room for."""
    for n_layers in layers:
        step = Prepared(record_fake(*transformer(n_layers, batch=8, tokens=64), device="a100"))
        n_values = len(step.trace.droppable.intersection(step.trace.saved))
        yield from (measure(step, group) for group in GROUPS if group < n_values)


TABLE = pivot(Figure, "ops", "{n_ops:,}", "{group:,} dropped", "{trial_us:,.0f} µs")
BENCHMARK = Benchmark("trials", figures, {"rows": Figure}, {"table": TABLE})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
