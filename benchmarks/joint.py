"""Ranks and recomputation for one budget, beside each alone and beside the same share of each layer.

One thread, trained networks of ``trained_nets``, Adam. Rows: the dense step; recomputation alone; decomposition alone
at a quarter; the same share of each layer with recomputation (the callback before ranks were shared out);
``fit_to_budget``. Peaks are true ones of a whole step by the profiler, weights, gradients and Adam's moments included;
times are medians of thread time over rounds in which all rows take turns; scores are taken without training, after
BatchNorm re-estimation (for G the loss in nats); choosing is in seconds of the processor, so that other work beside it
does not count. All are medians over the seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import process_time
from typing import Any

from torch import nn

from benchmarks.harness import Benchmark, pivot
from benchmarks.steps import AdamStep, in_turns
from benchmarks.trained_nets import Net, trained
from ctdr_lightning import decompose, fit_to_budget, plan, record
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError

MIB = 2**20
BUDGETS = {"D": (45 * MIB, 30 * MIB), "G": (0.87, 0.70, 0.52), "R": (0.70, 0.50), "V": (0.70, 0.50), "C": (0.70, 0.50)}
_SMALL_BATCH, _N_BATCHES = 4, 32
_SHOWN = ("dense", "recomputation alone", "decomposition alone, 1/4", "fit_to_budget")


@dataclass
class Way(AdamStep):
    """A network under a plan, and what was predicted of it."""

    least_bytes: int = 0  # the least peak that was found where no plan fits
    choosing_s: float | None = None
    predicted_bytes: int | None = None
    predicted_slowdown: float | None = None


@dataclass(frozen=True)
class Figure:
    """Medians of one way on one network under one budget, over the seeds that reach it where most do.

    Where it is not reached, ``peak_bytes`` is the least peak, and time over the dense step's and score are missing.
    Scores are percent right, or nats; ``choosing_s`` are processor seconds.
    """

    net: str
    budget_bytes: int
    way: str
    peak_bytes: int
    slowdown: float | None = None
    score: float | None = None
    choosing_s: float | None = None
    predicted_bytes: int | None = None
    predicted_slowdown: float | None = None
    seeds: int = 1
    reached: int = 1


def decomposed(net: Net, batches: list[Any]) -> dict[str, nn.Module]:
    """The network at a quarter of its parameters, in both ways that know no budget."""
    found: dict[str, nn.Module] = {}
    options = {"step": net.loss, "measure": False, "recompute": True, "progress": False}
    for name, allocate in (("decomposition alone", "auto"), ("same share of each layer", None)):
        found[name] = deepcopy(net.model).train()
        decompose(found[name], 0.25, allocate=allocate, data=batches if allocate else None, **options)
    return found


def ways(net: Net, batches: list[Any], budget: int, quarter: Mapping[str, nn.Module]) -> list[Way]:
    """Every way to meet a budget; those that cannot have no plan."""
    step, first = net.loss, batches[0]
    make = partial(_planned, net, first, budget)
    found = [
        Way("dense", deepcopy(net.model).train(), first, step),
        make("recomputation alone", deepcopy(net.model).train(), True),
    ]
    for name, plans in (("decomposition alone", False), ("same share of each layer", True)):
        found.append(make(f"{name}, 1/4", deepcopy(quarter[name]), plans))
    model, begin_s = deepcopy(net.model).train(), process_time()
    made = partial(Way, "fit_to_budget", model, first, step)
    try:
        fit = fit_to_budget(model, step, batches, budget, progress=False)
    except InfeasibleBudgetError as error:
        return [*found, made(least_bytes=error.least_peak_bytes)]
    predicted = {"predicted_bytes": fit.peak_bytes, "predicted_slowdown": fit.seconds / fit.dense_s}
    return [*found, made(plan=fit.plan, choosing_s=process_time() - begin_s, **predicted)]


def _planned(net: Net, batch: Any, budget: int, name: str, model: nn.Module, plans: bool) -> Way:
    if not plans:
        return Way(name, model, batch, net.loss)
    net.loss(model, batch).backward()
    model.zero_grad(set_to_none=True)
    state_bytes = 2 * sum(4 * p.numel() for p in model.parameters())
    trace = record(lambda: net.loss(model, batch)).with_static(state_bytes)
    model.zero_grad(set_to_none=True)
    try:
        return Way(name, model, batch, net.loss, plan(trace, budget))
    except (InfeasibleBudgetError, ConfigError) as error:
        return Way(name, model, batch, net.loss, least_bytes=getattr(error, "least_peak_bytes", 0))


def measured(net: Net, batches: list[Any], budget: int, quarter: Mapping[str, nn.Module], rounds: int) -> list[Figure]:
    """Every way under one budget."""
    found = ways(net, batches, budget, quarter)
    scores = [net.score(net.reestimated(deepcopy(way.model))) for way in found]
    peaks = [way.peak_bytes() for way in found]
    times = [time for _, time in in_turns([way.step for way in found], rounds)]
    figures = zip(found, peaks, times, scores, strict=True)
    return [_figure(net.name, budget, way, peak, time / times[0], score) for way, peak, time, score in figures]


def _figure(net: str, budget: int, way: Way, peak: int, slowdown: float, score: float) -> Figure:
    if peak > budget and way.name != "dense":
        return Figure(net, budget, way.name, way.least_bytes or peak, reached=0)
    predicted = (way.choosing_s, way.predicted_bytes, way.predicted_slowdown)
    return Figure(net, budget, way.name, peak, slowdown, score, *predicted)


def medians(runs: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Of the figures of several seeds, way by way; a budget is reached where most seeds reach it.

    Args:
        runs: The same ways and budgets in the same order, one list a seed.
    """
    return [_median(of) for of in zip(*runs, strict=True)]


def _median(of: Sequence[Figure]) -> Figure:
    reached = [figure for figure in of if figure.reached]
    most = 2 * len(reached) > len(of)
    counted = reached if most else [figure for figure in of if not figure.reached]

    def middle(name: str) -> float | None:
        found = [entry for figure in counted if (entry := getattr(figure, name)) is not None]
        return median(found) if found else None

    names = ("slowdown", "score", "choosing_s", "predicted_bytes", "predicted_slowdown")
    peak = round(median(figure.peak_bytes for figure in counted))
    numbers = {name: middle(name) for name in names}
    return replace(counted[0], peak_bytes=peak, seeds=len(of), reached=len(reached), **numbers)


def figures_of(name: str, seed: int, rounds: int) -> list[Figure]:
    """Every budget of one network of one seed."""
    net = trained(name, seed)
    batches = list(net.batches[:_N_BATCHES])
    if name == "G":  # slices of one long text: copied, or the whole text would count as the batch's memory
        batches = [tuple(t[:_SMALL_BATCH].clone() for t in batch) for batch in batches]
    dense = Way("dense", deepcopy(net.model).train(), batches[0], net.loss).peak_bytes()
    quarter, figures = decomposed(net, batches), []
    for budget in BUDGETS[name]:
        allowed = budget if isinstance(budget, int) else round(budget * dense)
        figures += measured(net, batches, allowed, quarter, rounds)
    return figures


def figures(*, nets: str = "DG", seeds: Sequence[int] = (0,), rounds: int = 7) -> Iterator[Figure]:
    """Every budget of each network.

    Args:
        nets: Their letters.
        seeds: Of their training.
        rounds: Behind each time.
    """
    for name in nets:
        yield from medians([figures_of(name, seed, rounds) for seed in seeds])


def _cell(figure: Figure) -> str:
    peak = f"{figure.peak_bytes / MIB:.1f} MiB"
    count = f" ({figure.reached} of {figure.seeds} seeds)" if 0 < figure.reached < figure.seeds else ""
    if figure.slowdown is None or figure.score is None:
        return f"no: {peak}{count}"
    time = "" if figure.way == "dense" else f"x{figure.slowdown:.2f}, "
    return f"{peak}, {time}{figure.score:.4g}{count}"


def _chosen(figures: Sequence[Figure]) -> str:
    ours = figures[-1]
    if ours.predicted_bytes is None:
        return " | "
    return f"{ours.predicted_bytes / MIB:.1f} MiB, x{ours.predicted_slowdown:.2f} | {ours.choosing_s:.0f} s"


def _asked(figure: Figure) -> str:
    return f"{figure.net}, {figure.budget_bytes / MIB:.1f} MiB"


TABLE = pivot(
    Figure, "network, budget", _asked, "{way}", _cell,
    right=("predicted | choosing", _chosen), where=lambda figure: figure.way in _SHOWN,
)  # fmt: skip
BENCHMARK = Benchmark("joint", figures, {"rows": Figure}, {"table": TABLE})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
