"""What one trial of the simulator costs, against the ops of the step and the size of the group that it changes.

``python -m benchmarks.trials [--layers 8 ...] [--folder outputs/trials]``. A trial asks what one value's change would
do to bytes and seconds. It is timed on transformers of growing depth: a value is dropped in the middle of a row of
dropped ones, so that a group of so many is played for the first time. Microseconds are process time, the median of
``N_TRIALS``. ``FOLDER/trials.json`` keeps them; a table of ``docs/policies.md`` is made from a committed copy of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import Attention
from ctdr_lightning.memory import RECOMPUTE, Prepared, Simulator, record_fake

LAYERS = (8, 32, 100)
GROUPS = (1, 10, 30, 100, 300)
N_TRIALS = 25


@dataclass(frozen=True)
class Figure:
    """Trials that make groups of one size in one step.

    Attributes:
        n_ops: Ops of the step.
        group: Values that are dropped in a row.
        trial_us: Microseconds of a trial.
        work: Units of the work by which a search is allotted.
    """

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


def _sum(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).sum()


def figures(layers: Sequence[int]) -> Iterator[Figure]:
    """Every group size that each net has room for."""
    for n_layers in layers:
        net = nn.Sequential(*[Attention() for _ in range(n_layers)])
        step = Prepared(record_fake(net, torch.randn(8, 64, 128), _sum, device="a100"))
        n_values = len(step.trace.droppable.intersection(step.trace.saved))
        yield from (measure(step, group) for group in GROUPS if group < n_values)


def table(text: str) -> str:
    """The figures of a ``trials.json`` as a Markdown table: a row a net, a column a group size."""
    found = rows_of(text, "rows", Figure)
    groups = sorted({figure.group for figure in found})
    lines = [["ops", *(f"{group:,} dropped" for group in groups)]]
    for n_ops, of in groupby(found, lambda figure: figure.n_ops):
        by_group = {figure.group: f"{figure.trial_us:,.0f} µs" for figure in of}
        lines.append([f"{n_ops:,}", *(by_group.get(group, "") for group in groups)])
    return markdown(text, lines)


def main() -> None:
    """Print the figures and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, default=Path("outputs/trials"))
    options = parser.parse_args()
    found = []
    for figure in figures(options.layers):
        found.append(figure)
        print(f"{figure.n_ops:6d} ops, group {figure.group:5d}: {figure.trial_us:9.0f} us, {figure.work:6.0f} units")
    write_figures(options.folder / "trials.json", rows=found)


if __name__ == "__main__":
    main()
