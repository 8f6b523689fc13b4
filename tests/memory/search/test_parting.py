"""Long replays are parted until a plan fits: an LSTM whose states the relaxation drops in one chain, other graphs."""

import pytest

from benchmarks.nets import lstm
from ctdr_lightning.memory import KEEP, Prepared, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds
from ctdr_lightning.memory.search import fastest
from ctdr_lightning.memory.search.fastest import Fastest
from ctdr_lightning.memory.search.local_search import LocalSearch
from ctdr_lightning.memory.search.parting import MOST_PLANS, _crossing, parted_plans
from ctdr_lightning.memory.search.rounding import relaxed_plans
from tests.memory.graphs import GRAPHS, chain, graph_trace


@pytest.fixture(scope="module")
def recurrent():
    return Prepared(record_fake(*lstm(64, 256, 256, 1), device="a100"))


def limit_of(step, share):
    resident_bytes = step.trace.resident_bytes
    return resident_bytes + int(share * (step.plain_peak_bytes - resident_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.4, 0.3])
def test_an_lstm_nearly_fits_once_its_replays_are_parted(recurrent, share):
    limit = limit_of(recurrent, share)
    rounded = next(relaxed_plans(recurrent, limit, [(1, 0.0)], [0.5]))
    bound_s = lower_bound_seconds(recurrent, limit)
    first = simulate(recurrent.trace, parted_plans(recurrent, limit, bound_s)[0])
    room = recurrent.plain_peak_bytes - recurrent.trace.resident_bytes
    assert simulate(recurrent.trace, rounded).peak_bytes - limit > 0.15 * room
    assert first.peak_bytes - limit < 0.01 * room
    assert first.seconds < 1.05 * bound_s


@pytest.mark.parametrize("share", [0.5, 0.4])
def test_an_lstm_is_planned_with_little_work(recurrent, share, monkeypatch):
    limit = limit_of(recurrent, share)

    def found():
        return Fastest(recurrent, LocalSearch(recurrent, allowance=60_000), limit).run()

    assert found().peak_bytes <= limit
    monkeypatch.setattr(fastest, "parted_plans", lambda step, budget_bytes, bound_s: [])
    assert found().peak_bytes > limit


BUDGETS = [
    (name, share)
    for name, nodes in GRAPHS.items()
    for share in (0.7, 0.4)
    if lower_bound_seconds(step := Prepared(graph_trace(nodes)), limit_of(step, share)) < float("inf")
]


@pytest.mark.parametrize(("name", "share"), BUDGETS)
def test_parted_plans_are_few_and_none_that_fits_is_below_the_bound(name, share):
    step = Prepared(graph_trace(GRAPHS[name]))
    limit = limit_of(step, share)
    bound_s = lower_bound_seconds(step, limit)
    plans = [simulate(step.trace, actions) for actions in parted_plans(step, limit, bound_s)]
    assert 0 < len(plans) <= MOST_PLANS
    for made in plans:
        assert made.peak_bytes > limit or made.seconds >= bound_s * (1 - 1e-9)
        assert not [v for v in step.trace.unholdable if made.actions.get(v) == KEEP]


def test_a_replay_is_parted_where_the_fewest_bytes_cross():
    trace = graph_trace(chain([8, 8, 8, 8, 2, 8, 8, 8, 8]))
    forward = [number for number, op in enumerate(trace.ops) if not op.backward]
    sizes = {v: trace.value_bytes(v) for v in trace.droppable}
    assert [sizes[v] for v in _crossing(trace, forward)] == [min(sizes.values())]
    assert _crossing(trace, forward[:1]) == []
