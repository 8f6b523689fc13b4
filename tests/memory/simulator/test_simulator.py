import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning.memory import KEEP, RECOMPUTE, RECOMPUTE_EACH, Simulator, Tape, plan, record, simulate
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from tests.memory.bounds.test_lower_bound import graphs
from tests.memory.graphs import GRAPHS, chain, graph_trace
from tests.memory.harness import Bench, everything_dropped, planned, random_actions

ACTIONS = (KEEP, RECOMPUTE, RECOMPUTE_EACH)


def recorded():
    torch.manual_seed(0)
    block = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2))
    net, x = nn.Sequential(nn.Conv2d(1, 4, 3), *block, *block, nn.Flatten()), torch.randn(2, 1, 8, 8)

    def step():
        hidden = net[:5](x)
        return (net[5:9](hidden) + hidden.sigmoid()).chunk(2)[0].square().sum()

    return record(step)


TRACES = [recorded(), *map(graph_trace, GRAPHS.values())]


def assert_same(simulator, fresh):
    a, b = simulator.timeline(), fresh.timeline()
    assert np.array_equal(a.bytes_at, b.bytes_at)
    assert a.seconds == pytest.approx(b.seconds)
    assert a.recompute_seconds == pytest.approx(b.recompute_seconds, abs=1e-12)
    assert a.peak_bytes == b.peak_bytes == simulator.peak_bytes
    assert a.replays == b.replays
    assert np.array_equal(a.ends, b.ends)
    assert sorted(a.returns) == sorted(b.returns)


@pytest.mark.parametrize("trace", TRACES)
@settings(max_examples=40)
@given(data=st.data())
def test_changes_give_what_a_fresh_simulator_gives(trace, data):
    simulator, actions = Simulator(trace), {}
    ids = sorted(trace.droppable)
    for _ in range(data.draw(st.integers(1, 8))):
        change = {v: data.draw(st.sampled_from(ACTIONS)) for v in data.draw(st.lists(st.sampled_from(ids), max_size=5))}
        what = data.draw(st.sampled_from(("change", "change and undo", "give back", "trial")))
        if what == "trial":
            before = simulator.bytes_at().copy(), simulator.seconds
            found = simulator.trial(change)
            assert np.array_equal(simulator.bytes_at(), before[0])
            after = Simulator(trace, actions | change)
            assert before[1] + found.seconds == pytest.approx(after.seconds)
            there = before[0].copy()
            for first, end, n_bytes in found.segments:
                there[first:end] += n_bytes
            assert np.array_equal(there, after.bytes_at())
            continue
        undo = simulator.change(change)
        if what == "change and undo":
            simulator.undo()
        elif what == "give back":
            simulator.change(undo)
        else:
            actions |= change
        assert_same(simulator, Simulator(trace, actions))


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_given_back_was_never_there(action):
    """Also for values that autograd does not save, whose replays leave nothing behind unless they are told to."""
    trace, everything = TRACES[0], dict.fromkeys(TRACES[0].saved, RECOMPUTE)
    for value in trace.droppable:
        simulator = Simulator(trace)
        simulator.change(simulator.change({value: action}))
        simulator.change(everything)
        assert_same(simulator, Simulator(trace, everything))


@settings(max_examples=60)
@given(graphs(max_nodes=7), st.data())
def test_any_graph_any_changes(nodes, data):
    trace = graph_trace(nodes)
    simulator, actions = Simulator(trace), {}
    for _ in range(3):
        change = {v: data.draw(st.sampled_from(ACTIONS)) for v in range(len(nodes))}
        simulator.change(change)
        actions |= change
        assert_same(simulator, Simulator(trace, actions))


def test_the_plain_chain():
    """Three nodes of 4 bytes, each saved for the next: forward up to 12, then a gradient beside what is left."""
    trace = graph_trace(chain([4, 4, 4]))
    timeline = simulate(trace)
    assert timeline.seconds == trace.seconds
    assert timeline.recompute_seconds == 0
    assert timeline.replays == 0
    assert timeline.bytes_at[:3].tolist() == [4, 8, 12]
    assert timeline.peak_bytes == timeline.bytes_at.max()


def test_dropping_saves_bytes_and_costs_seconds():
    trace = graph_trace(chain([8] * 6))
    middle = 2
    timeline = simulate(trace, {middle: RECOMPUTE})
    assert timeline.recompute_seconds == trace.ops[middle].seconds
    assert timeline.replays == 1
    there = simulate(trace).bytes_at - timeline.bytes_at
    gone = trace.ops[middle + 1].tick + 1
    back = trace.values[middle].saves[0].unpacked[0]
    assert set(there[gone:back]) == {8}


@pytest.mark.parametrize("trace", TRACES)
def test_pythons_time_is_charged_for_each_op_that_runs_again(trace):
    actions = dict.fromkeys(trace.saved, RECOMPUTE)
    n_ops = len(trace.ops)
    whole = dict.fromkeys(range(n_ops), 1.0)
    counted = simulate(trace.with_costs([1.0] * n_ops, {}, replay_shares=whole), actions)
    charged = simulate(trace.with_costs([0.0] * n_ops, {}, python_s_per_replay=0.5), actions)
    assert bool(counted.recompute_seconds) == bool(trace.saved)
    assert charged.seconds == charged.recompute_seconds == pytest.approx(0.5 * counted.recompute_seconds)
    assert charged.peak_bytes == counted.peak_bytes


def test_temporaries_count():
    trace = graph_trace(chain([4, 4, 4]))
    wide = trace.with_costs([op.seconds for op in trace.ops], {1: 100})
    assert simulate(wide).bytes_at[trace.ops[1].tick] == simulate(trace).bytes_at[trace.ops[1].tick] + 100
    dropped = simulate(wide, {1: RECOMPUTE}).bytes_at - simulate(trace, {1: RECOMPUTE}).bytes_at
    assert (dropped == 100).sum() == 2, "once in the forward, once in the replay"


@pytest.mark.parametrize("trace", TRACES)
def test_who_is_alive_at_the_peak(trace):
    for actions in ({}, everything_dropped(trace), random_actions(trace, 1)):
        timeline = simulate(trace, actions)
        alive = timeline.alive_at_peak()
        n_bytes = [row[2] for row in alive]
        assert n_bytes == sorted(n_bytes, reverse=True)
        assert timeline.bytes_at[timeline.peak_tick] == timeline.peak_bytes
        named = sum(n_bytes) + trace.resident_bytes
        assert named <= timeline.peak_bytes
        if not actions:
            temps = sum(op.temp_bytes for op in trace.ops if op.tick == timeline.peak_tick)
            assert named + temps == timeline.peak_bytes
    modules = {row[0] for row in simulate(TRACES[0]).alive_at_peak()}
    assert modules & {"0", "1", "2", "5", "6"}


def test_plans_and_actions_are_simulated_alike():
    trace = TRACES[0]
    made = plan(trace, policy="sqrt")
    assert np.array_equal(simulate(trace, made).bytes_at, simulate(trace, made.actions).bytes_at)
    assert simulate(trace, made).peak_bytes == made.peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_the_simulated_peak_is_the_measured_one(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())])
    x = torch.randn(256, 32)

    def step(net):
        hidden = net[:9](x)
        return (net[9:](hidden) * hidden).mean()

    bench = Bench(net, step)
    trace = bench.record()
    made = planned(trace, random_actions(trace, seed))
    with PeakMeter() as meter:
        bench.run(Tape(made))
    assert made.peak_bytes - trace.resident_bytes == pytest.approx(meter.live.peak, rel=0.02)
