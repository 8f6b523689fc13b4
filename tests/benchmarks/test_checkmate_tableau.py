"""Checkmate's own program on graphs whose optimum is known, and its schedules played step by step."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.checkmate_tableau import Graph, least_seconds, solve_tableau
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError


def training_chain(n_layers):
    """A uniform chain: forwards of 1 s, a loss of 0 s, backwards of 2 s; all outputs of one byte.

    The backward of a layer reads the gradient behind it, the layer's input and its output.
    """
    parents = [[i - 1] if i else [] for i in range(n_layers)] + [[n_layers - 1]]
    for step in range(n_layers):
        layer = n_layers - 1 - step
        parents.append(sorted({n_layers + step, layer, *([layer - 1] if layer else [])}))
    seconds = [1.0] * n_layers + [0.0] + [2.0] * n_layers
    return Graph(seconds, [1] * len(seconds), parents)


def played(graph, tableau):
    """Seconds and peak of a schedule, without what it holds for nothing; what nothing wants any more is freed."""
    n, seconds, peak = len(graph.seconds), 0.0, 0
    there = set()
    for t in range(n):
        kept = set(np.flatnonzero(tableau.held[t + 1])) if t + 1 < n else set()
        wanted = kept.union(*(graph.parents[k] for k in np.flatnonzero(tableau.runs[t])))
        assert set(np.flatnonzero(tableau.held[t])) & wanted <= there
        there = set(np.flatnonzero(tableau.held[t])) & wanted
        for k in np.flatnonzero(tableau.runs[t]):
            assert set(graph.parents[k]) <= there
            there.add(k)
            seconds += graph.seconds[k]
            peak = max(peak, sum(graph.n_bytes[i] for i in there))
            following = np.flatnonzero(tableau.runs[t])
            later = {p for j in following if j > k for p in graph.parents[j]}
            there = {i for i in there if i in later or i in kept}
    return seconds, peak


UNIFORM = [
    (8, 8, 1.083, 1.083), (8, 6, 1.167, 1.167), (8, 5, 1.208, 1.292), (8, 4, 1.250, 1.875), (16, 12, 1.125, 1.125),
]  # fmt: skip


@pytest.mark.parametrize(("n_layers", "budget", "relaxed", "optimum"), UNIFORM)
def test_uniform_chain_has_the_known_optimum(n_layers, budget, relaxed, optimum):
    graph = training_chain(n_layers)
    plain = sum(graph.seconds)
    bound = least_seconds(graph, budget) / plain
    found = solve_tableau(graph, budget)
    assert relaxed - 5e-4 < bound < optimum + 5e-4
    assert found.seconds / plain == pytest.approx(optimum, abs=5e-4)
    assert found.bound_seconds == pytest.approx(found.seconds, rel=1e-3)
    seconds, peak = played(graph, found)
    assert seconds == pytest.approx(found.seconds)
    assert peak <= budget


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n_layers", "budget", "optimum"), [(16, 9, 1.1875), (16, 7, 1.250), (24, 16, 1.139), (24, 10, 1.222)]
)
def test_longer_uniform_chains_have_the_known_optimum(n_layers, budget, optimum):
    graph = training_chain(n_layers)
    assert solve_tableau(graph, budget, 200).seconds / sum(graph.seconds) == pytest.approx(optimum, abs=5e-4)


def test_relaxation_of_long_chains_has_the_known_bound():
    for n_layers, budget, bound in ((16, 12, 1.125), (16, 9, 1.188), (16, 7, 1.229)):
        graph = training_chain(n_layers)
        assert least_seconds(graph, budget) / sum(graph.seconds) == pytest.approx(bound, abs=5e-4)


def fastest(graph, budget):
    """Seconds of the fastest schedule, by looking at every set of held values at every stage."""
    n = len(graph.seconds)
    states = {frozenset(): 0.0}
    for t in range(n):
        following = {}
        for held, so_far in states.items():
            for extra in itertools.chain.from_iterable(itertools.combinations(range(t), k) for k in range(t + 1)):
                runs = sorted({*extra, t})
                for kept in itertools.chain.from_iterable(
                    itertools.combinations(range(t + 1), k) for k in range(t + 2)
                ):
                    seconds = _stage(graph, held, runs, frozenset(kept), budget)
                    if seconds is not None:
                        total = so_far + seconds
                        following[frozenset(kept)] = min(total, following.get(frozenset(kept), float("inf")))
        states = following
    return min(states.values(), default=float("inf"))


def _stage(graph, held, runs, kept, budget):
    if not kept <= held | set(runs):
        return None
    there, seconds = set(held), 0.0
    wanted_at_all = {p for j in runs for p in graph.parents[j]} | kept
    if not held <= wanted_at_all:
        return None  # another state without the useless value is no worse
    for position, k in enumerate(runs):
        if not set(graph.parents[k]) <= there:
            return None
        there.add(k)
        seconds += graph.seconds[k]
        if sum(graph.n_bytes[i] for i in there) > budget:
            return None
        later = {p for j in runs[position + 1 :] for p in graph.parents[j]}
        there = {i for i in there if i in later or i in kept}
    return seconds


@st.composite
def graphs(draw):
    n = draw(st.integers(2, 5))
    parents = [[]]
    for node in range(1, n):
        parents.append(sorted({node - 1, draw(st.integers(0, node - 1))}))
    seconds = [float(draw(st.integers(1, 4))) for _ in range(n)]
    return Graph(seconds, [draw(st.integers(1, 4)) for _ in range(n)], parents)


@settings(max_examples=25)
@given(graphs(), st.integers(2, 14))
def test_small_graphs_are_solved_as_by_brute_force(graph, budget):
    expected = fastest(graph, budget)
    if expected == float("inf"):
        with pytest.raises(InfeasibleBudgetError):
            solve_tableau(graph, budget, 20)
    else:
        found = solve_tableau(graph, budget, 20)
        assert found.seconds == pytest.approx(expected)
        assert least_seconds(graph, budget) <= expected + 1e-9


def test_too_large_a_graph_names_its_size():
    with pytest.raises(ConfigError, match="81 nodes"):
        solve_tableau(training_chain(40), 10)
