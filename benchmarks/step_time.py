"""Predicted against measured time of planned steps: how far the planner's seconds can be trusted.

``auto`` plans each net at shares of its peak above weights; a plan's seconds over the trace's, and the planned step's
thread time over the plain one's just before it, one thread, medians over rounds in turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import Benchmark, pivot
from benchmarks.nets import Net, gpt2, net_r, net_rn18, transformer, vision
from benchmarks.policies import Way, measured, steady_trace
from benchmarks.steps import guided, keep_freed_memory, step_peak_bytes
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Budget, plan

NETS: dict[str, Callable[[], Net]] = {
    "R": net_r,
    "T": transformer,
    "RN18": net_rn18,
    "ResNet-50": partial(vision, "resnet50", 16),
    "GPT-2": gpt2,
}


@dataclass(frozen=True)
class Figure:
    """One net at a share of its plain peak above weights; times over the plain step's, None where no plan fits."""

    net: str
    share: float
    predicted: float | None = None
    measured: float | None = None


def figures_of(name: str, shares: Sequence[float], rounds: int) -> list[Figure]:
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


def figures(
    nets: Sequence[str] = tuple(NETS), *, shares: Sequence[float] = (0.8, 0.6, 0.4), rounds: int = 9
) -> Iterator[Figure]:
    """Every net at every share."""
    keep_freed_memory()
    for name in nets:
        yield from figures_of(name, shares, rounds)


def _cell(figure: Figure) -> str:
    if figure.predicted is None or figure.measured is None:
        return "no plan"
    off = figure.predicted / figure.measured - 1
    return f"x{figure.predicted:.3f}, measured x{figure.measured:.3f} ({off:+.1%})"


TABLE = pivot(Figure, "net", "{net}", "{share:g} of its peak", _cell)
BENCHMARK = Benchmark("step_time", figures, {"rows": Figure}, {"table": TABLE}, {"nets": NETS})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
