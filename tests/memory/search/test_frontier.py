"""The frontier against the definition: what is not beaten in both bytes and seconds."""

from hypothesis import given
from hypothesis import strategies as st

from ctdr_lightning.memory import KEEP, RECOMPUTE, RECOMPUTE_EACH
from ctdr_lightning.memory.search.frontier import Frontier

plans = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=40)


def filled(found):
    frontier = Frontier([5, 7], bytes((0, 2)))
    for number, (peak, seconds) in enumerate(found):
        frontier.add(peak, float(seconds), lambda number=number: bytes((number % 3, number % 2)))
    return frontier


@given(plans)
def test_it_holds_what_nothing_beats(found):
    best = {p for p in found if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in found)}
    assert [(p.peak_bytes, p.seconds) for p in filled(found)] == sorted((peak, float(s)) for peak, s in best)
    assert len(filled(found)) == len(best)


@given(plans, st.integers(-1, 21))
def test_the_fastest_that_fits_and_the_smallest_that_is_fast_enough(found, limit):
    frontier = filled(found)
    assert frontier.least.peak_bytes == min(peak for peak, _ in found)
    fits = [seconds for peak, seconds in found if peak <= limit]
    at = frontier.at(limit)
    assert (at.seconds if at else None) == (min(fits) if fits else None)
    fast = [peak for peak, seconds in found if seconds <= limit]
    within = frontier.within(limit)
    assert (within.peak_bytes if within else None) == (min(fast) if fast else None)


def test_actions_are_told_where_they_are_not_the_default():
    frontier = Frontier([5, 7, 9], bytes((0, 2, 0)))
    frontier.add(1, 1.0, lambda: bytes((1, 2, 2)))
    assert frontier.actions(frontier.least) == {5: RECOMPUTE, 9: RECOMPUTE_EACH}
    frontier.add(0, 0.0, lambda: bytes((0, 0, 0)))
    assert frontier.actions(frontier.least) == {7: KEEP}


def test_a_plan_as_good_as_another_does_not_replace_it():
    frontier = Frontier([5], bytes((0,)))
    assert frontier.add(3, 3.0, lambda: b"\0")
    assert not frontier.add(3, 3.0, lambda: b"\1")
    assert not frontier.add(4, 3.0, lambda: b"\1")
    assert frontier.add(3, 2.0, lambda: b"\2")
    assert [p.state for p in frontier] == [b"\2"]
