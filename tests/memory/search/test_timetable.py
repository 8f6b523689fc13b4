"""Moving as a choice of the search: its ticks are those of the settled plan, and no other policy's moves are better."""

from dataclasses import replace
from itertools import product

import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Prepared, plan, simulate
from ctdr_lightning.memory.search.local_search import LocalSearch
from ctdr_lightning.memory.search.moves import Moves
from ctdr_lightning.memory.search.others import moved_to, others_of
from ctdr_lightning.memory.search.timetable import Timetable
from ctdr_lightning.memory.simulator.actions import Keep, Offload, Recompute
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.machine import Link
from tests.memory.policies.test_conformance import benched

MOVING = [name for name, policy in POLICIES.items() if Offload in policy.uses and name != "auto"]


def linked(name, times):
    """A net with a link that moves all saved bytes in so many steps' time, each way."""
    trace = benched(name)[2]
    rate = sum(trace.value_bytes(v) for v in trace.saved) / (trace.seconds * times)
    return trace.with_machine([Link("host", rate, rate, latency_s=1e-6)])


def at(trace, share):
    return Budget(trace.resident_bytes + int(share * (simulate(trace).peak_bytes - trace.resident_bytes)))


def test_a_value_alone_is_placed_where_it_is_settled():
    step = Prepared(linked("residual", 1.0))
    timetable = Timetable(Simulator(step), "host")
    for value, action in moved_to(others_of(step, ()), "host").items():
        placed, delay_s = timetable.place(value, action)
        found = judge(step, {value: action})
        assert placed == found.actions[value]
        assert delay_s >= found.transfers.waits_s - 1e-12


def test_two_values_share_a_lane():
    step = Prepared(linked("residual", 3.0))
    moves = moved_to(others_of(step, ()), "host")
    first, second = sorted(moves)[:2]
    timetable = Timetable(Simulator(step), "host")
    alone, _ = timetable.place(second, moves[second])
    timetable.settle({first: moves[first]})
    behind, _ = timetable.place(second, moves[second])
    assert behind.gone_by > alone.gone_by


@pytest.mark.parametrize("times", [0.3, 1.0, 3.0])
def test_a_plan_of_the_search_is_the_plan_that_is_judged(times):
    step = Prepared(linked("residual", times))
    search = LocalSearch(step, others=others_of(step, ()))
    for share in (0.8, 0.5):
        search.polish({}, at(step.trace, share).peak_bytes)
    moving = 0
    for point in search.frontier:
        made = judge(step, search.frontier.actions(point))
        moving += any(isinstance(action, Offload) for action in made.actions.values())
        assert (made.peak_bytes, made.seconds) == (point.peak_bytes, pytest.approx(point.seconds))
    assert moving


def test_a_move_is_taken_back_for_what_it_waits():
    """Keeping a value again saves the wait for it, which the simulator plays."""
    step = Prepared(linked("residual", 10.0))
    moves = Moves(Simulator(step), others_of(step, ()))
    everything = moved_to(others_of(step, ()), "host")
    moves.load(moves.state_of(everything))
    assert moves.simulator.transfers().waits_s > 0
    item = max(i for i, value in enumerate(moves.items) if value in everything)
    assert moves.look(moves.n_choices * item).seconds < 0


TIMES, LARGER = (0.3, 1.0, 3.0), ("T", "DenseNet-like")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "times"),
    [
        *product(["residual"], TIMES),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in product(LARGER, TIMES)),
    ],
)
def test_no_policy_that_moves_is_ahead(net, times):
    trace = linked(net, times)
    for share in (0.8, 0.5, 0.35):
        budget = at(trace, share)
        found = POLICIES["auto"](trace, budget)
        for name in MOVING:
            try:
                other = POLICIES[name](trace, budget)
            except InfeasibleBudgetError:
                continue
            if other.peak_bytes <= budget.peak_bytes:
                assert found.peak_bytes <= budget.peak_bytes, name
                assert found.seconds <= 1.01 * other.seconds, name


@pytest.mark.slow
def test_where_nothing_else_fits_the_step_waits_for_its_transfers():
    trace = linked("residual", 20.0)
    with pytest.raises(InfeasibleBudgetError) as without:
        plan(replace(trace, links=()), 1)
    with pytest.raises(InfeasibleBudgetError) as error:
        plan(trace, 1)
    assert error.value.least_peak_bytes <= without.value.least_peak_bytes
    made = plan(trace, error.value.least_peak_bytes)
    assert {type(action) for action in made.actions.values()} <= {Keep, Recompute, Offload}


@pytest.mark.slow
def test_with_seconds_moving_makes_the_peak_smaller():
    trace = linked("residual", 0.3)
    trace = trace.with_costs([1e-3] * len(trace.ops), {})  # to recompute anything takes longer than that
    seconds = trace.seconds + 5e-4
    alone = plan(replace(trace, links=()), Budget(seconds=seconds))
    moved = plan(trace, Budget(seconds=seconds))
    assert moved.seconds <= seconds
    assert moved.peak_bytes < 0.9 * alone.peak_bytes
