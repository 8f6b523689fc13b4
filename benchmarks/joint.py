"""Ranks and recomputation for one budget, beside each alone and beside the same share of each layer.

``python -m benchmarks.joint [--nets DG] [--seeds 0 1 2] [--rounds 7] [--folder FOLDER]``, one thread, trained networks
of ``trained_nets``, Adam. Rows: the dense step; recomputation alone; decomposition alone at a quarter; the same share
of each layer with recomputation (the callback before ranks were shared out); ``fit_to_budget``. Peaks are true ones of
a whole step by the profiler, weights, gradients and Adam's moments included; times are medians of thread time over
rounds in which all rows take turns; scores are taken without training, after BatchNorm re-estimation (for G the loss in
nats); choosing is in seconds of the processor, so that other work beside it does not count.

``FOLDER/joint.json`` keeps the medians over the seeds; the table of ``docs/joint.md`` is made from a committed copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from time import process_time, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.peak import cpu_peak_bytes
from benchmarks.trained_nets import Net, copied, trained
from ctdr_lightning import Plan, decompose, fit_to_budget, plan, record
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.evaluate.measure import one_thread
from ctdr_lightning.joint.for_budget import states_per_weight
from ctdr_lightning.joint.turns import RealStep
from ctdr_lightning.memory.values.tensors import storage_bytes

MIB = 2**20
BUDGETS = {"D": (45 * MIB, 30 * MIB), "G": (0.87, 0.70, 0.52), "R": (0.70, 0.50), "V": (0.70, 0.50), "C": (0.70, 0.50)}
_SMALL_BATCH, _N_BATCHES = 4, 32
_SHOWN = ("dense", "recomputation alone", "decomposition alone, 1/4", "fit_to_budget")


@dataclass
class Way:
    """A network under a plan with its Adam."""

    name: str
    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]
    plan: Plan | None = None
    note: str = ""
    least_bytes: int = 0  # the least peak that was found where no plan fits
    choosing_s: float | None = None
    predicted_bytes: int | None = None
    predicted_slowdown: float | None = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-5)
        self.real = RealStep(self.model, partial(self.loss, self.model, self.batch), self.plan)

    def step(self) -> None:
        """Forward, backward and Adam's step."""
        self.real.run()
        self.optimizer.step()

    def peak_bytes(self) -> int:
        """True peak of a step, what is there before it included."""
        self.step()
        self.optimizer.zero_grad(set_to_none=True)
        state = [t for entries in self.optimizer.state.values() for t in entries.values() if isinstance(t, Tensor)]
        there = storage_bytes([*self.model.parameters(), *self.model.buffers(), *self.batch, *state])
        return there + cpu_peak_bytes(self.step)


@dataclass(frozen=True)
class Figure:
    """One way on one network under one budget.

    Attributes:
        net: Its letter.
        budget_bytes: What the peak may reach.
        way: Its name.
        peak_bytes: Of a step; where the way does not reach the budget, the least peak that it reaches.
        slowdown: Time of a step over the dense one's; None where the budget is not reached.
        score: Percent right, or nats; None where the budget is not reached.
        choosing_s: Processor seconds of choosing ranks and plan; None where nothing was chosen.
        predicted_bytes: The peak that was predicted, where one was.
        predicted_slowdown: The time, over the dense step's.
        seeds: How many networks it is the median of.
        reached: How many of them reached the budget.
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
        found[name] = copied(net).train()
        decompose(found[name], 0.25, allocate=allocate, data=batches if allocate else None, **options)
    return found


def ways(net: Net, batches: list[Any], budget: int, quarter: Mapping[str, nn.Module]) -> list[Way]:
    """Every way to meet a budget; those that cannot say so in their note."""
    step, first = net.loss, batches[0]
    make = partial(_planned, net, first, budget)
    found = [Way("dense", copied(net).train(), first, step), make("recomputation alone", copied(net).train(), True)]
    for name, plans in (("decomposition alone", False), ("same share of each layer", True)):
        found.append(make(f"{name}, 1/4", deepcopy(quarter[name]), plans))
    model, begin_s = copied(net).train(), process_time()
    try:
        fit = fit_to_budget(model, step, batches, budget, progress=False)
    except InfeasibleBudgetError as error:
        return [*found, Way("fit_to_budget", model, first, step, None, f"no: {error.problem}", error.least_peak_bytes)]
    choosing_s, slowdown = process_time() - begin_s, fit.seconds / fit.dense_s
    told = f"KL {fit.loss:.4f}, predicted {fit.peak_bytes / MIB:.1f} MiB, x{slowdown:.2f}; {choosing_s:.0f} s"
    predicted = (choosing_s, fit.peak_bytes, slowdown)
    return [*found, Way("fit_to_budget", model, first, step, fit.plan, told, 0, *predicted)]


def _planned(net: Net, batch: Any, budget: int, name: str, model: nn.Module, plans: bool) -> Way:
    if not plans:
        return Way(name, model, batch, net.loss)
    net.loss(model, batch).backward()
    model.zero_grad(set_to_none=True)
    state_bytes = round(states_per_weight("adam") * sum(4 * p.numel() for p in model.parameters()))
    trace = record(lambda: net.loss(model, batch)).with_static(state_bytes)
    model.zero_grad(set_to_none=True)
    try:
        return Way(name, model, batch, net.loss, plan(trace, budget))
    except (InfeasibleBudgetError, ConfigError) as error:
        least = getattr(error, "least_peak_bytes", 0)
        return Way(name, model, batch, net.loss, None, f"no: least peak {least / MIB:.1f} MiB", least)


def seconds(found: list[Way], rounds: int) -> list[float]:
    """Median seconds of each way's step, all in turns."""
    taken: list[list[float]] = [[] for _ in found]
    for _ in range(rounds):
        for way, times in zip(found, taken, strict=True):
            begin = thread_time()
            way.step()
            times.append(thread_time() - begin)
    return [median(times) for times in taken]


def show(
    net: Net, batches: list[Any], budget: int, quarter: Mapping[str, nn.Module], rounds: int, seed: int
) -> list[Figure]:
    """Print one budget's table; returns its figures."""
    found = ways(net, batches, budget, quarter)
    scores = [net.score(net.reestimated(deepcopy(way.model))) for way in found]
    peaks = [way.peak_bytes() for way in found]
    times = seconds(found, rounds)
    print(f"\n{net.name}, seed {seed}, budget {budget / MIB:.1f} MiB ({budget / peaks[0]:.0%} of dense)")
    print(f"{'':30s} {'parameters':>10s} {'peak MiB':>8s} {'fits':>5s} {'step/dense':>10s} {'score':>8s}  note")
    for way, score, peak, time in zip(found, scores, peaks, times, strict=True):
        n_parameters = sum(p.numel() for p in way.model.parameters())
        fits = "yes" if peak <= budget else "no"
        print(
            f"{way.name:30s} {n_parameters:10,} {peak / MIB:8.1f} {fits:>5s} {time / times[0]:10.2f} {score:8.4g}  "
            f"{way.note}",
            flush=True,
        )
    measured = zip(found, peaks, times, scores, strict=True)
    return [_figure(net.name, budget, way, peak, time / times[0], score) for way, peak, time, score in measured]


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


def table(text: str) -> str:
    """The figures of a ``joint.json`` as a Markdown table."""
    figures = rows_of(text, "rows", Figure)
    more = ["predicted", "choosing"] if any(figure.choosing_s is not None for figure in figures) else []
    head = ["network, budget", *_SHOWN, *more]
    lines = [head]
    for (net, budget), of in groupby(figures, lambda figure: (figure.net, figure.budget_bytes)):
        by_way = {figure.way: figure for figure in of}
        cells = [_cell(by_way[way]) for way in _SHOWN]
        lines.append([f"{net}, {budget / MIB:.1f} MiB", *cells, *_prediction(by_way[_SHOWN[-1]])[: len(more)]])
    return markdown(text, lines)


def _cell(figure: Figure) -> str:
    peak = f"{figure.peak_bytes / MIB:.1f} MiB"
    count = f" ({figure.reached} of {figure.seeds} seeds)" if 0 < figure.reached < figure.seeds else ""
    if figure.slowdown is None or figure.score is None:
        return f"no: {peak}{count}"
    time = "" if figure.way == "dense" else f"x{figure.slowdown:.2f}, "
    return f"{peak}, {time}{figure.score:.4g}{count}"


def _prediction(figure: Figure) -> tuple[str, str]:
    if figure.predicted_bytes is None or figure.predicted_slowdown is None or figure.choosing_s is None:
        return "", ""
    return f"{figure.predicted_bytes / MIB:.1f} MiB, x{figure.predicted_slowdown:.2f}", f"{figure.choosing_s:.0f} s"


def run(name: str, seed: int, rounds: int) -> list[Figure]:
    """Every budget of one network of one seed."""
    net = trained(name, seed)
    batches = list(net.batches[:_N_BATCHES])
    if name == "G":  # slices of one long text: copied, or the whole text would count as the batch's memory
        batches = [tuple(t[:_SMALL_BATCH].clone() for t in batch) for batch in batches]
    dense = Way("dense", copied(net).train(), batches[0], net.loss).peak_bytes()
    quarter, figures = decomposed(net, batches), []
    for budget in BUDGETS[name]:
        allowed = budget if isinstance(budget, int) else round(budget * dense)
        figures += show(net, batches, allowed, quarter, rounds, seed)
    return figures


def main() -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nets", default="DG")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("outputs/joint"))
    options = parser.parse_args()
    figures: dict[str, list[list[Figure]]] = {}
    with one_thread():
        for name in options.nets:
            for seed in options.seeds:
                figures.setdefault(name, []).append(run(name, seed, options.rounds))
                rows = [figure for runs in figures.values() for figure in medians(runs)]
                write_figures(options.folder / "joint.json", rows=rows)


if __name__ == "__main__":
    main()
