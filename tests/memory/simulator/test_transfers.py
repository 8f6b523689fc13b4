"""Transfers event by event, on a step of one second an op."""

from itertools import pairwise

import numpy as np
import pytest

from ctdr_lightning.memory.simulator.actions import Offload
from ctdr_lightning.memory.simulator.schedule import SLACK, scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.transfers import Lanes, Transfers, Trip
from ctdr_lightning.memory.traces.machine import Link
from tests.memory.graphs import Node, graph_trace


def trace_of(n_bytes=10, **link):
    """Six ops of a second, each saving its input of ten bytes; backward ops of two seconds."""
    nodes = [Node((i - 1,) if i else (), n_bytes) for i in range(6)]
    return graph_trace(nodes).with_machine([Link("host", **{"out_bytes_per_s": 10.0, "in_bytes_per_s": 5.0} | link)])


def needed(trace, value):
    return trace.values[value].saves[0].unpacked[0]


def trip(trace, value, **ticks):
    return Trip(value, Offload("host", **ticks), needed(trace, value))


def play(*step) -> Transfers:
    return Lanes(*step).transfers()


def times(found):
    return [(m.value, m.out, m.asked_s, m.begin_s, m.end_s, m.wait_s) for m in found.moves]


def test_a_transfer_that_has_time_is_not_waited_for():
    trace = trace_of()
    found = play(trace, [trip(trace, 0, out_at=0, gone_by=1, back_at=needed(trace, 1))])
    asked = found.starts_s[needed(trace, 1)]
    assert times(found) == [(0, True, 1.0, 1.0, 2.0, 0.0), (0, False, asked, asked, asked + 2, 0.0)]
    assert found.waits_s == 0
    assert found.moved_bytes == 10
    assert found.starts_s[-1] == pytest.approx(trace.seconds)


def test_a_late_read_stalls_by_what_is_left_of_it():
    trace = trace_of()
    at = needed(trace, 3)
    found = play(trace, [trip(trace, 3, out_at=3, gone_by=4, back_at=at)])
    assert found.waits_s == pytest.approx(2.0)
    assert found.starts_s[-1] == pytest.approx(trace.seconds + 2.0)


def test_a_write_that_is_not_done_when_it_must_be_gone_stalls():
    trace = trace_of(out_bytes_per_s=4.0)
    found = play(trace, [trip(trace, 0, out_at=0, gone_by=1, back_at=needed(trace, 1))])
    assert found.moves[0].wait_s == pytest.approx(1.5)  # 2.5 s for ten bytes, one of them behind the second op
    assert found.starts_s[2] == pytest.approx(2 + 1.5)


def test_a_lane_takes_one_after_the_other():
    trace = trace_of(out_bytes_per_s=5.0)
    trips = [trip(trace, v, out_at=v, gone_by=5, back_at=needed(trace, v)) for v in (0, 1)]
    outs = [m for m in play(trace, trips).moves if m.out]
    assert [(m.begin_s, m.end_s) for m in outs] == [(1.0, 3.0), (3.0, 5.0)]


def test_a_shared_link_runs_one_direction_at_a_time():
    begins = []
    for shared in (False, True):
        trace = trace_of(out_bytes_per_s=0.5, shared=shared)
        # Both are late: the second is still on its way out when the first is asked back.
        found = play(trace, [
            trip(trace, 0, out_at=0, gone_by=5, back_at=needed(trace, 4)),
            trip(trace, 3, out_at=3, gone_by=5, back_at=needed(trace, 3)),
        ])  # fmt: skip
        moves = sorted(found.moves, key=lambda m: m.begin_s)
        begins.append(next(m.begin_s for m in moves if not m.out))
        if shared:
            assert all(a.end_s <= b.begin_s for a, b in pairwise(moves))
    assert begins[0] <= begins[1]


def test_latency_and_granules_count():
    link = Link("disk", 10.0, 10.0, latency_s=0.25, granule=4)
    assert link.seconds(9) == (0.25 + 1.2, 0.25 + 1.2)


def test_nothing_is_read_before_it_is_written():
    trace = trace_of(out_bytes_per_s=0.1, in_bytes_per_s=1e9)
    found = play(trace, [trip(trace, 4, out_at=4, gone_by=4, back_at=needed(trace, 4))])
    assert found.moves[1].begin_s >= found.moves[0].end_s


def test_what_is_left_open_is_settled_so_that_nothing_waits():
    trace = trace_of(out_bytes_per_s=20.0, in_bytes_per_s=20.0)
    actions = scheduled(trace, {v: Offload("host") for v in (1, 2, 3)})
    assert all(min(a.out_at, a.gone_by, a.back_at) >= 0 for a in actions.values())
    simulator = Simulator(trace, actions)
    assert simulator.seconds == pytest.approx(trace.seconds)
    for value, action in actions.items():
        assert action.back_at < needed(trace, value), "asked back ahead"
        moves = [m for m in simulator.transfers().moves if m.value == value]
        assert moves[1].end_s + (SLACK - 1) * 0.5 <= simulator.transfers().starts_s[needed(trace, value)] + 1e-9


def test_a_slow_link_costs_what_it_must_and_no_deadlock():
    trace = trace_of(out_bytes_per_s=0.5, in_bytes_per_s=0.5)
    simulator = Simulator(trace, scheduled(trace, {v: Offload("host") for v in range(5)}))
    least = 5 * 10 / 0.5
    assert simulator.seconds >= least
    assert np.all(np.diff(simulator.transfers().starts_s) >= 0)


def test_ticks_that_were_given_stay():
    trace = trace_of()
    given = {0: Offload("host", (), 2, 4, needed(trace, 0))}
    assert scheduled(trace, given) == given
