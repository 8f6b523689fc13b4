"""Ranks and recomputation for one budget, beside each alone and beside the same share of each layer.

``python -m benchmarks.joint [--nets DG] [--seed 0] [--rounds 7] [--folder FOLDER]``, one thread, trained networks of
``trained_nets``, Adam. Rows: the dense step; recomputation alone; decomposition alone at a quarter; the same share of
each layer with recomputation (the callback before ranks were shared out); ``fit_to_budget``. Peaks are true ones of a
whole step by the profiler, weights, gradients and Adam's moments included; times are medians of thread time over rounds
in which all rows take turns; scores are taken without training, after BatchNorm re-estimation (for G the loss in nats).

``FOLDER/joint.json`` keeps the figures; the table of ``docs/joint.md`` is made from a committed copy of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peak import cpu_peak_bytes
from benchmarks.trained_nets import Net, copied, trained
from ctdr_lightning import Plan, decompose, fit_to_budget, plan, record
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.evaluate.measure import one_thread
from ctdr_lightning.joint.for_budget import states_per_weight
from ctdr_lightning.joint.turns import RealStep
from ctdr_lightning.memory.values.tensors import storage_bytes

MIB = 2**20
BUDGETS = {"D": (45 * MIB, 30 * MIB), "G": (0.87, 0.70, 0.52), "R": (0.70, 0.50), "V": (0.70, 0.50), "C": (0.70, 0.50)}
_SMALL_BATCH = 4
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
    """

    net: str
    budget_bytes: int
    way: str
    peak_bytes: int
    slowdown: float | None = None
    score: float | None = None


def ways(net: Net, batches: list[Any], budget: int) -> list[Way]:
    """Every way to meet a budget; those that cannot say so in their note."""
    step, first = net.loss, batches[0]
    make = partial(_planned, net, first, budget)
    found = [Way("dense", copied(net).train(), first, step), make("recomputation alone", copied(net).train(), True)]
    for name, allocate, plans in (("decomposition alone", "auto", False), ("same share of each layer", None, True)):
        model = copied(net).train()
        data = batches if allocate else None
        decompose(model, 0.25, allocate=allocate, data=data, step=step, measure=False, recompute=True, progress=False)
        found.append(make(f"{name}, 1/4", model, plans))
    model, begin_s = copied(net).train(), perf_counter()
    try:
        fit = fit_to_budget(model, step, batches, budget, progress=False)
    except InfeasibleBudgetError as error:
        return [*found, Way("fit_to_budget", model, first, step, None, f"no: {error.problem}", error.least_peak_bytes)]
    told = f"KL {fit.loss:.4f}, predicted {fit.peak_bytes / MIB:.1f} MiB, {fit.seconds / fit.dense_s:.2f} dense steps"
    return [*found, Way("fit_to_budget", model, first, step, fit.plan, f"{told}; {perf_counter() - begin_s:.0f} s")]


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


def show(net: Net, batches: list[Any], budget: int, rounds: int) -> list[Figure]:
    """Print one budget's table; returns its figures."""
    found = ways(net, batches, budget)
    scores = [net.score(net.reestimated(deepcopy(way.model))) for way in found]
    peaks = [way.peak_bytes() for way in found]
    times = seconds(found, rounds)
    print(f"\n{net.name}, budget {budget / MIB:.1f} MiB ({budget / peaks[0]:.0%} of dense)")
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
    if peak <= budget or way.name == "dense":
        return Figure(net, budget, way.name, peak, slowdown, score)
    return Figure(net, budget, way.name, way.least_bytes or peak)


def table(text: str) -> str:
    """The figures of a ``joint.json`` as a Markdown table."""
    figures = [Figure(**row) for row in json.loads(text)]
    lines = [["network, budget", *_SHOWN], ["---"] * (1 + len(_SHOWN))]
    for (net, budget), of in groupby(figures, lambda figure: (figure.net, figure.budget_bytes)):
        by_way = {figure.way: figure for figure in of}
        lines.append([f"{net}, {budget / MIB:.1f} MiB", *(_cell(by_way[way]) for way in _SHOWN)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(figure: Figure) -> str:
    peak = f"{figure.peak_bytes / MIB:.1f} MiB"
    if figure.slowdown is None or figure.score is None:
        return f"no: {peak}"
    time = "" if figure.way == "dense" else f"x{figure.slowdown:.2f}, "
    return f"{peak}, {time}{figure.score:.4g}"


def main() -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nets", default="DG")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("outputs/joint"))
    options = parser.parse_args()
    figures: list[Figure] = []
    with one_thread():
        for name in options.nets:
            net = trained(name, options.seed)
            batches = list(net.batches[:8])
            if name == "G":  # slices of one long text: copied, or the whole text would count as the batch's memory
                batches = [tuple(t[:_SMALL_BATCH].clone() for t in batch) for batch in batches]
            dense = Way("dense", copied(net).train(), batches[0], net.loss).peak_bytes()
            for budget in BUDGETS[name]:
                bytes_allowed = budget if isinstance(budget, int) else round(budget * dense)
                figures += show(net, batches, bytes_allowed, options.rounds)
                write_text(options.folder / "joint.json", json.dumps([asdict(f) for f in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
