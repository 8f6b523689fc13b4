"""Lower bounds against the plans of the policies that plan on chains and on graphs.

``python -m benchmarks.bounds`` makes two tables: the uniform chain of the papers (relaxation, Checkmate's optimum,
rotor), and nets R and T at shares of their activation peak (bound, then each policy's seconds over the plain step and,
in brackets, over the bound). Everything is simulated; only the op times of R and T are measured, Python's is left out.

``FOLDER/bounds.json`` keeps the figures; `benchmarks.documents` makes tables of a committed copy of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import NETS
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Trace, record, simulate
from ctdr_lightning.memory.bounds.checkmate_tableau import Graph, least_seconds, solve_tableau
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, lower_bound_seconds
from ctdr_lightning.memory.policies.rotor import ChainLink, solve

CHAINS = {8: (8, 6, 5, 4), 16: (12, 9, 7)}
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


@dataclass(frozen=True)
class Chain:
    """A uniform chain under a budget in outputs of one layer: seconds over the plain step."""

    n_layers: int
    budget: int
    relaxed: float
    optimum: float
    rotor: float


@dataclass(frozen=True)
class Bounded:
    """A net under a share of its activation peak: seconds over the plain step, of the bound and by policy.

    None stands for a policy that found no plan.
    """

    net: str
    share: float
    bound: float
    policies: dict[str, float | None]


def uniform_chain(n_layers: int) -> Graph:
    """Forwards of 1 s, a loss of 0 s, backwards of 2 s; every output of one byte."""
    parents: list[list[int]] = [[i - 1] if i else [] for i in range(n_layers)] + [[n_layers - 1]]
    for step in range(n_layers):
        layer = n_layers - 1 - step
        parents.append(sorted({n_layers + step, layer, *([layer - 1] if layer else [])}))
    return Graph([1.0] * n_layers + [0.0] + [2.0] * n_layers, [1] * len(parents), parents)


def chains(time_limit_s: float) -> Iterator[Chain]:
    """The uniform chains."""
    for n_layers, budgets in CHAINS.items():
        graph, plain = uniform_chain(n_layers), 3.0 * n_layers
        table = solve([ChainLink(1, 2, 1, 1)] * n_layers, 1, 1, max(budgets))
        for budget in budgets:
            relaxed = least_seconds(graph, budget) / plain
            optimum = solve_tableau(graph, budget, time_limit_s).seconds / plain
            yield Chain(n_layers, budget, relaxed, optimum, float(table.seconds[0, -1, budget - 1] / plain))


def planned(trace: Trace, policy: str, budget: Budget) -> float | None:
    """A policy's seconds over the plain step; None where it found no plan."""
    try:
        return simulate(trace, POLICIES[policy](trace, budget)).seconds / trace.seconds
    except InfeasibleBudgetError:
        return None


def bounded(name: str, policies: Sequence[str], time_limit_s: float) -> Iterator[Bounded]:
    """One net at every share that some plan may reach."""
    net, inputs, step = NETS[name]()
    step(net, inputs).backward()
    trace = replace(record(lambda: step(net, inputs)), python_s_per_replay=0.0)
    resident, peak = trace.resident_bytes, simulate(trace).peak_bytes
    for share in SHARES:
        budget = Budget(int(resident + share * (peak - resident)), time_limit_s=time_limit_s)
        if floor_bytes(trace) > budget.peak_bytes:
            return
        bound = lower_bound_seconds(trace, budget.peak_bytes) / trace.seconds
        yield Bounded(name, share, bound, {policy: planned(trace, policy, budget) for policy in policies})


def table(text: str, part: str) -> str:
    """One part of a ``bounds.json`` as a Markdown table: ``chains`` or ``nets``."""
    if part == "chains":
        head = ["layers", "budget", "relaxed", "optimum", "`rotor`"]
        cells = [[str(row.n_layers), str(row.budget), *(f"{s:.3f}" for s in (row.relaxed, row.optimum, row.rotor))]
                 for row in rows_of(text, part, Chain)]  # fmt: skip
        return markdown(text, [head, *cells])
    rows = rows_of(text, part, Bounded)
    head = ["net, share", "bound", *(f"`{policy}`" for policy in rows[0].policies)]
    return markdown(text, [head, *map(_cells, rows)])


def _cells(row: Bounded) -> list[str]:
    found = ["none" if s is None else f"{s:.3f} ({s / row.bound - 1:+.1%})" for s in row.policies.values()]
    return [f"{row.net}, {row.share:.0%}", f"{row.bound:.3f}", *found]


def main() -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=["R", "T"], choices=sorted(NETS))
    parser.add_argument("--policies", nargs="+", default=["checkmate", "rotor", "optimal", "optimal_fast"])
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a plan")
    parser.add_argument("--folder", type=Path, default=Path("outputs/bounds"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    path, nets = options.folder / "bounds.json", []
    uniform = list(chains(options.time_limit * 3))
    for name in options.nets:
        nets += list(bounded(name, options.policies, options.time_limit))
        write_figures(path, chains=uniform, nets=nets)
    print(f"{table(path.read_text(), 'chains')}\n{table(path.read_text(), 'nets')}")


if __name__ == "__main__":
    main()
