"""Capuchin on its ground: memory saving per second, and how choices change each other's."""

from itertools import pairwise

import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, RECOMPUTE, Budget, simulate
from ctdr_lightning.memory.policies.capuchin import candidates_of, take
from tests.memory.graphs import Node, chain, graph_trace, residual


def test_the_most_memory_per_second_goes_first():
    trace = graph_trace(chain([6, 6, 6, 6, 6, 6], [1.0, 9.0, 9.0, 2.0, 9.0, 9.0]))
    peak = simulate(trace).peak_bytes
    assert POLICIES["capuchin"](trace, Budget(peak_bytes=peak)).actions == {}
    assert POLICIES["capuchin"](trace, Budget(peak_bytes=peak - 1)).actions == {0: RECOMPUTE}
    assert POLICIES["capuchin"](trace, Budget(peak_bytes=peak - 7)).actions == {0: RECOMPUTE, 3: RECOMPUTE}


def test_a_tensor_whose_source_is_gone_must_make_that_too():
    """Algorithm 2 on a chain 0 -> 1 -> 2 -> 3 of 1, 2, 4, 8 seconds."""
    trace = graph_trace(chain([1] * 5, [1.0, 2.0, 4.0, 8.0, 1.0]))
    candidates, chosen = candidates_of(trace), {}
    assert {v: (c.sources, c.replay_s) for v, c in candidates.items()} == {
        0: (set(), 1.0), 1: ({0}, 2.0), 2: ({1}, 4.0), 3: ({2}, 8.0),
    }  # fmt: skip
    take(candidates[1], candidates, chosen)
    assert (candidates[2].sources, candidates[2].replay_s, candidates[2].extra_s) == ({0}, 6.0, 0.0)
    assert (candidates[0].sources, candidates[0].replay_s, candidates[0].extra_s) == (set(), 1.0, 1.0)
    take(candidates[2], candidates, chosen)
    # both 1 and 2 would now have to make 0 again
    assert candidates[0].extra_s == 2.0
    assert (candidates[3].sources, candidates[3].replay_s) == ({0}, 14.0)
    take(candidates[0], candidates, chosen)
    assert chosen[1].sources == chosen[2].sources == set()
    assert (candidates[3].sources, candidates[3].replay_s) == (set(), 15.0)


def test_unsaved_values_in_between_cost_their_time():
    trace = graph_trace([Node((), 4), Node((0,), 4, 3.0, 6.0, saved=False), Node((1,), 4, 2.0, 4.0), Node((2,), 4)])
    candidate = candidates_of(trace)[2]
    assert candidate.sources == {0}
    assert candidate.replay_s == 5.0
    assert candidate.msps == 4 / 5


def test_less_memory_for_more_time_down_to_the_end():
    trace = graph_trace(residual(8))
    plain = simulate(trace).peak_bytes
    seconds = []
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        timeline = simulate(trace, POLICIES["capuchin"](trace, Budget(peak_bytes=int(share * plain))).actions)
        assert timeline.peak_bytes <= share * plain
        seconds.append(timeline.seconds)
    assert all(a < b for a, b in pairwise(seconds))
    least = simulate(trace, POLICIES["capuchin"](trace, Budget()).actions).peak_bytes
    with pytest.raises(InfeasibleBudgetError) as found:
        POLICIES["capuchin"](trace, Budget(peak_bytes=least - 1))
    assert found.value.least_peak_bytes == least
