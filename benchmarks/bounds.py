"""Lower bounds against the plans of the policies that plan on chains and on graphs.

Two tables: the uniform chain of the papers (relaxation, Checkmate's optimum,
rotor), and nets R and T at shares of their activation peak (bound, then each policy's seconds over the plain step and,
in brackets, over the bound). Everything is simulated; only the op times of R and T are measured, Python's is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.checkmate_tableau import Graph, least_seconds, solve_tableau
from benchmarks.harness import Benchmark, Figures, table
from benchmarks.nets import NETS
from benchmarks.policies import planned
from ctdr_lightning.memory import Prepared, record, simulate
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


def bounded(name: str, policies: Sequence[str], time_limit_s: float) -> Iterator[Bounded]:
    """One net at every share that some plan may reach."""
    net, inputs, step_of = NETS[name]()
    step_of(net, inputs).backward()
    trace = replace(record(lambda: step_of(net, inputs)), python_s_per_replay=0.0)
    resident, peak = trace.resident_bytes, simulate(trace).peak_bytes
    step = Prepared(trace)
    for share in SHARES:
        above = int(share * (peak - resident))
        if floor_bytes(trace) > resident + above:
            return
        bound = lower_bound_seconds(trace, resident + above) / trace.seconds
        plans = {policy: planned(step, above, policy, time_limit_s=time_limit_s) for policy in policies}
        found = {policy: made and made.seconds / trace.seconds for policy, made in plans.items()}
        yield Bounded(name, share, bound, found)


def figures(
    *,
    nets: Sequence[str] = ("R", "T"),
    policies: Sequence[str] = ("checkmate", "rotor", "optimal", "optimal_fast"),
    time_limit: float = 10.0,
) -> Iterator[Chain | Bounded]:
    """Both tables.

    Args:
        nets: Of the second.
        policies: Compared with the bound.
        time_limit: Seconds a plan.
    """
    yield from chains(time_limit * 3)
    for name in nets:
        yield from bounded(name, policies, time_limit)


def _nets(found: Figures) -> str:
    rows = found.rows(Bounded)
    head = ["net, share", "bound", *(f"`{policy}`" for policy in (rows[0].policies if rows else ()))]
    return found.markdown(" | ".join(head), list(map(_line, rows)))


def _line(row: Bounded) -> str:
    found = ["none" if s is None else f"{s:.3f} ({s / row.bound - 1:+.1%})" for s in row.policies.values()]
    return " | ".join([f"{row.net}, {row.share:.0%}", f"{row.bound:.3f}", *found])


CHAINED = "{n_layers} | {budget} | {relaxed:.3f} | {optimum:.3f} | {rotor:.3f}"
TABLES = {"chains": table(Chain, "layers | budget | relaxed | optimum | `rotor`", CHAINED), "nets": _nets}
BENCHMARK = Benchmark("bounds", figures, {"chains": Chain, "nets": Bounded}, TABLES, {"nets": NETS})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
