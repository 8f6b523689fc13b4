"""Predicted against measured time of planned steps: how far the planner's seconds can be trusted.

``python -m benchmarks.step_time [NETS] [--shares .8 .6 .4] [--rounds 9] [--folder FOLDER]``: ``auto`` plans each net at
shares of its peak above weights; a plan's seconds over the trace's, and the planned step's thread time over the plain
one's just before it, one thread, medians over rounds in turns. ``FOLDER/step_time.json`` keeps the figures;
`benchmarks.documents` makes a table of a committed copy of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import Net, gpt2, net_r, net_rn18, net_t, vision
from benchmarks.peak import keep_freed_memory, step_peak_bytes
from benchmarks.policies import Way, guided, measured, steady_trace
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Budget, plan

NETS: dict[str, Callable[[], Net]] = {
    "R": net_r,
    "T": net_t,
    "RN18": net_rn18,
    "ResNet-50": partial(vision, "resnet50", 16),
    "GPT-2": gpt2,
}
SHARES = (0.8, 0.6, 0.4)


@dataclass(frozen=True)
class Figure:
    """One net at one budget; times over the plain step's.

    Attributes:
        net: Its name.
        share: The budget as a share of the plain peak above weights.
        predicted: The plan's seconds over the trace's; None where no plan fits.
        measured: The median of measured ratios; None where no plan fits.
    """

    net: str
    share: float
    predicted: float | None = None
    measured: float | None = None


def figures_of(name: str, shares: list[float], rounds: int) -> list[Figure]:
    """Plan and time one net at every share."""
    net, inputs, step_of = NETS[name]()
    step = partial(step_of, net, inputs)
    trace = steady_trace(net, step)
    ways = [Way("plain", lambda: step().backward())]
    dynamic_bytes = step_peak_bytes(net, ways[0].run)
    for share in shares:
        try:
            made = plan(trace, Budget(trace.resident_bytes + int(share * dynamic_bytes)))
        except InfeasibleBudgetError:
            continue
        ways.append(Way("auto", guided(step, made), share, made))
    times = {way.asked: time for way, (_, time) in zip(ways, measured(net, ways, rounds), strict=True)}
    predicted = {way.asked: way.plan.seconds / trace.seconds for way in ways if way.plan is not None}
    return [Figure(name, share, predicted.get(share), times.get(share)) for share in shares]


def table(text: str) -> str:
    """The figures of a ``step_time.json`` as a Markdown table: a row a net."""
    figures = rows_of(text, "rows", Figure)
    shares = list(dict.fromkeys(figure.share for figure in figures))
    lines = [["net", *(f"{share:g} of its peak" for share in shares)]]
    for net, of in groupby(figures, lambda figure: figure.net):
        lines.append([net, *map(_cell, of)])
    return markdown(text, lines)


def _cell(figure: Figure) -> str:
    if figure.predicted is None or figure.measured is None:
        return "no plan"
    off = figure.predicted / figure.measured - 1
    return f"x{figure.predicted:.3f}, measured x{figure.measured:.3f} ({off:+.1%})"


def main() -> None:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nets", nargs="*", default=list(NETS))
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path("outputs/step_time"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows: list[Figure] = []
    path = options.folder / "step_time.json"
    for name in options.nets:
        rows += figures_of(name, options.shares, options.rounds)
        write_figures(path, rows=rows)
    print(table(path.read_text()))


if __name__ == "__main__":
    main()
