"""Checkmate's program itself, one stage an op, on a plain graph: the referee for small graphs.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, arXiv 1910.02653.
Stage t computes node t for the first time and may compute any node before it again; R[t, i] says that node i runs in
stage t, S[t, i] that it is held from stage t - 1 to stage t. The paper's bytes after each node of a stage (U), counted
with a product of binaries for each moment at which a value may be freed (FREE), are written here as the values that
must still be live: from its place in the stage on, if a later node of the stage reads it or the next stage holds it. In
whole numbers this is the same; its relaxation is tighter, and tighter than the paper's wherever they differ.

Complexity: O(n^3) rows for n nodes; a chain of 49 nodes takes seconds to a minute, its relaxation less than a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory.bounds.linear_program import LinearProgram, Solution

MOST_NODES = 64  # the program has a row for each pair of nodes and each edge a stage: it grows with the square and more


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they run.

    Attributes:
        seconds: Time of each node.
        n_bytes: Size of each node's output.
        parents: The inputs of each node: nodes before it.
    """

    seconds: Sequence[float]
    n_bytes: Sequence[int]
    parents: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Tableau:
    """A schedule.

    Attributes:
        seconds: Its time.
        bound_seconds: No schedule within the budget is faster.
        runs: ``runs[t, i]``: whether stage t runs node i; booleans of shape ``(nodes, nodes)``.
        held: ``held[t, i]``: whether stage t starts with the output of node i.
    """

    seconds: float
    bound_seconds: float
    runs: np.ndarray
    held: np.ndarray


def least_seconds(graph: Graph, budget_bytes: int) -> float:
    """Lower bound on the seconds of every schedule within a budget, by the relaxation; infinite where none exists."""
    found = _Program(graph, budget_bytes).program.relax()
    return found.bound if found is not None else float("inf")


def solve_tableau(graph: Graph, budget_bytes: int, time_limit_s: float = 60.0) -> Tableau:
    """The fastest schedule within a budget.

    Raises:
        ConfigError: If the graph has too many nodes.
        InfeasibleBudgetError: If no schedule was found.
    """
    if len(graph.seconds) > MOST_NODES:
        raise ConfigError(
            f"graph has {len(graph.seconds)} nodes; its tableau can be solved for at most {MOST_NODES}.",
            "Group nodes to stages, or use policy 'checkmate' or 'auto' on a trace.",
        )
    program = _Program(graph, budget_bytes)
    found = program.program.solve(time_limit_s)
    if found is None:
        raise InfeasibleBudgetError(
            f"No schedule of the graph was found for {budget_bytes} bytes in {time_limit_s} s.",
            "Raise the budget or the time limit.",
        )
    return program.tableau(found)


class _Program:
    """The variables R and S and all constraints between them."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.program = LinearProgram()
        add = self.program.variable
        n = len(graph.seconds)
        self.runs = [[add(graph.seconds[i], fixed=i == t, whole=True) for i in range(t + 1)] for t in range(n)]
        self.held = [[add(whole=True) for _ in range(t)] for t in range(n)]
        self.readers: list[list[int]] = [[] for _ in range(n)]
        for node, parents in enumerate(graph.parents):
            for parent in parents:
                self.readers[parent].append(node)
        for t in range(n):
            self._needs_parents(t)
            self._persists(t)
            self._limit_bytes(t, budget_bytes)

    def _needs_parents(self, t: int) -> None:
        for node in range(t + 1):
            for parent in self.graph.parents[node]:
                terms = [(self.runs[t][node], 1.0), (self.runs[t][parent], -1.0)]
                self.program.at_most([*terms, *((s, -1.0) for s in self.held[t][parent : parent + 1])], 0.0)

    def _persists(self, t: int) -> None:
        for node in range(t):
            terms = [(self.held[t][node], 1.0), (self.runs[t - 1][node], -1.0)]
            self.program.at_most([*terms, *((s, -1.0) for s in self.held[t - 1][node : node + 1])], 0.0)

    def _limit_bytes(self, t: int, budget_bytes: int) -> None:
        """Before its place in the stage a value is there if held; from there on, while anything still wants it."""
        shares = [n_bytes / budget_bytes for n_bytes in self.graph.n_bytes]
        for k in range(t + 1):
            terms = [(self.held[t][i], shares[i]) for i in range(k + 1, t)]
            for i in range(k + 1):
                there = self.program.variable()
                for wanted in self._wants(t, i, k):
                    self.program.at_most([(wanted, 1.0), (there, -1.0)], 0.0)
                terms.append((there, shares[i]))
            self.program.at_most(terms, 1.0)

    def _wants(self, t: int, node: int, k: int) -> list[int]:
        wants = [self.runs[t][reader] for reader in self.readers[node] if k <= reader <= t]
        wants += [self.runs[t][node]] if k == node else []
        return wants + ([self.held[t + 1][node]] if t + 1 < len(self.held) else [])

    def tableau(self, found: Solution) -> Tableau:
        n = len(self.runs)
        runs, held = np.zeros((n, n), dtype=bool), np.zeros((n, n), dtype=bool)
        for t in range(n):
            runs[t, : t + 1] = found.values[self.runs[t]] > 0.5
            held[t, :t] = found.values[self.held[t]] > 0.5
        return Tableau(found.cost, found.bound, runs, held)
