"""The checkpoint subset with the least peak: both programs against every subset, and on traces."""

from dataclasses import dataclass
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, simulate
from ctdr_lightning.memory.policies.optimal import least_peak_by_last
from ctdr_lightning.memory.policies.optimal_fast import fastest_under, least_peak
from tests.memory.graphs import GRAPHS, graph_trace
from tests.memory.graphs import chain as nodes_of_chain


@dataclass(frozen=True)
class Stage:
    output_bytes: int
    inner_bytes: int
    saved_bytes: int


def plain(sizes):
    return [Stage(size, 0, size) for size in sizes]


plain_chains = st.lists(st.integers(0, 40), min_size=1, max_size=12).map(plain)
small = st.integers(0, 30)
staged_chains = st.lists(
    st.builds(lambda out, inner, saved: Stage(out, inner, inner + out * saved), small, small, st.booleans()),
    min_size=1,
    max_size=9,
)
chains = plain_chains | staged_chains


def subsets(n):
    return chain.from_iterable(combinations(range(n - 1), k) for k in range(n))


def segments(stages, cuts):
    """Bytes of each segment: all that its stages save, but for the checkpoint that ends it."""
    edges = [-1, *cuts, len(stages) - 1]
    for start, end in pairwise(edges):
        inside = [s.saved_bytes for s in stages[start + 1 : end]]
        yield sum(inside) + (stages[end].inner_bytes if end in cuts else stages[end].saved_bytes)


def summed_peak(stages, cuts):
    return sum(stages[c].output_bytes for c in cuts) + max(segments(stages, cuts))


def refined_peak(stages, cuts):
    held = [sum(stages[c].output_bytes for c in cuts[:k]) for k in range(len(cuts) + 1)]
    return max(h + s for h, s in zip(held, segments(stages, cuts), strict=True))


@given(chains)
def test_summed_peak_equals_brute_force_for_each_last_checkpoint(stages):
    found = least_peak_by_last(stages)
    for last, subset in enumerate(found, start=-1):
        rivals = [c for c in subsets(len(stages)) if (c[-1] if c else -1) == last]
        assert subset.cuts in rivals
        assert subset.peak_bytes == summed_peak(stages, subset.cuts) == min(summed_peak(stages, c) for c in rivals)


@given(chains)
def test_refined_peak_equals_brute_force(stages):
    found = least_peak(stages)
    assert found.peak_bytes == refined_peak(stages, found.cuts)
    assert found.peak_bytes == min(refined_peak(stages, c) for c in subsets(len(stages)))


@given(chains)
def test_refined_peak_equals_brute_force_for_each_last_checkpoint(stages):
    for last in range(-1, len(stages) - 1):
        rivals = [c for c in subsets(len(stages)) if (c[-1] if c else -1) == last]
        found = least_peak(stages, last)
        assert found.cuts in rivals
        assert found.peak_bytes == refined_peak(stages, found.cuts) == min(refined_peak(stages, c) for c in rivals)


@given(chains, st.integers(0, 300))
def test_fastest_under_a_budget_equals_brute_force(stages, budget):
    found = fastest_under(stages, budget)
    fitting = [c[-1] if c else -1 for c in subsets(len(stages)) if refined_peak(stages, c) <= budget]
    if not fitting:
        assert found is None
    else:
        assert found.peak_bytes == refined_peak(stages, found.cuts) <= budget
        assert (found.cuts[-1] if found.cuts else -1) == min(fitting)


def test_uniform_chain_gives_the_known_results():
    # Chen: 2 sqrt(n) - 1 of n. With used checkpoints freed, a peak of p carries segments of p, p - 1, ... stages and
    # the checkpoints between them: p (p + 3) / 2 - 1 stages.
    assert min(s.peak_bytes for s in least_peak_by_last(plain([1] * 100))) == 19
    assert least_peak(plain([1] * 103)).peak_bytes == 13
    assert least_peak(plain([1] * 104)).peak_bytes == 14


def test_refined_subset_is_never_worse():
    sizes = [7, 3, 9, 9, 2, 5, 5, 11, 4, 8, 1, 6]
    assert least_peak(plain(sizes)).peak_bytes <= min(s.peak_bytes for s in least_peak_by_last(plain(sizes)))


@pytest.mark.parametrize("policy", ["optimal", "optimal_fast"])
@pytest.mark.parametrize("name", GRAPHS)
def test_policy_fits_the_budget_or_names_the_least_peak(policy, name):
    trace = graph_trace(GRAPHS[name])
    plain_peak = simulate(trace).peak_bytes
    choose = POLICIES[policy]
    least = choose(trace, Budget()).peak_bytes
    for peak_bytes in {plain_peak, *range(least, plain_peak, max((plain_peak - least) // 5, 1))}:
        found = choose(trace, Budget(peak_bytes=peak_bytes)).actions
        assert simulate(trace, found).peak_bytes <= peak_bytes
        assert found == choose(trace, Budget(peak_bytes=peak_bytes)).actions
    with pytest.raises(InfeasibleBudgetError, match=policy) as caught:
        choose(trace, Budget(peak_bytes=least // 4))
    assert caught.value.least_peak_bytes >= least


@pytest.mark.parametrize("policy", ["optimal", "optimal_fast"])
def test_policy_on_a_uniform_chain_saves_as_predicted(policy):
    trace = graph_trace(nodes_of_chain([64] * 36))
    plain_peak, found = simulate(trace).peak_bytes, POLICIES[policy](trace, Budget())
    assert found.peak_bytes <= 0.4 * plain_peak
    assert found.recompute_seconds <= 36
    loose = POLICIES[policy](trace, Budget(peak_bytes=int(0.9 * plain_peak)))
    assert loose.recompute_seconds < found.recompute_seconds


def test_seconds_limit_gives_the_least_peak_within_it():
    trace = graph_trace(nodes_of_chain([64] * 16))
    limit = trace.seconds + 6
    found = simulate(trace, POLICIES["optimal_fast"](trace, Budget(seconds=limit)).actions)
    assert found.seconds <= limit
    least = POLICIES["optimal_fast"](trace, Budget())
    assert least.peak_bytes < found.peak_bytes < simulate(trace).peak_bytes
