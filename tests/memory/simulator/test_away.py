"""Values that are put away: bytes and seconds of the timeline, kept up to date change by change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import KEEP, RECOMPUTE, RECOMPUTE_EACH, Simulator, record
from ctdr_lightning.memory.simulator.actions import Compress, Offload
from ctdr_lightning.memory.simulator.away import away_bytes
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from tests.memory.graphs import GRAPHS, chain, graph_trace

LINKS = [Link("host", 2.0, 4.0, 0.5), Link("disk", 1.0, 1.0, 0.25, shared=True, granule=2, device_bytes=3)]
COSTS = [
    CodecCost("mask", True, "two_valued", 1.0, encode_s_per_byte=1e-9, decode_s_per_byte=2e-9, encode_temp_share=0.5),
    CodecCost("short", True, "index", 16.0, encode_call_s=1e-3, decode_call_s=2e-3),
    CodecCost("sign", True, "sign_only", 1.0),
    CodecCost("zvc", True, "zeros", 0.0, 1.0, drops_zeros=True, decode_s_per_byte=1e-9),
    CodecCost("bf16", False, "float", 16.0),
]


def recorded():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Dropout(0.2), nn.Conv2d(4, 2, 1), nn.ReLU(inplace=True), nn.Flatten(),
    )  # fmt: skip
    x = torch.randn(2, 1, 14, 14)
    return record(lambda: net(x).square().sum()).with_machine(LINKS, COSTS)


RECORDED = recorded()
TRACES = [RECORDED, *(graph_trace(nodes).with_machine(LINKS, COSTS) for nodes in GRAPHS.values())]


def choices(trace, value):
    """The actions that a value can be given."""
    found = [KEEP, RECOMPUTE, RECOMPUTE_EACH]
    facts = facts_of(trace)[value]
    if not facts.movable:
        return found
    fit = [()] + [(c.name,) for c in trace.codecs if c.needs in facts.kinds]
    found += [Compress(codecs) for codecs in fit if codecs]
    last, half = trace.n_ticks - 1, trace.n_ticks // 2
    found += [Offload(to, codecs) for to in ("host", "disk") for codecs in fit]
    return [*found, Offload("host", (), 2, half, half + 1), Offload("disk", fit[-1], 0, 1, last)]


def same(a, b):
    a, b = a.timeline(), b.timeline()
    assert np.array_equal(a.bytes_at, b.bytes_at)
    assert a.seconds == pytest.approx(b.seconds)
    assert a.transfers.moves == b.transfers.moves or sorted(map(repr, a.transfers.moves)) == sorted(
        map(repr, b.transfers.moves)
    )


@pytest.mark.parametrize("trace", TRACES)
@settings(max_examples=40)
@given(data=st.data())
def test_changes_give_what_a_fresh_simulator_gives(trace, data):
    simulator, actions = Simulator(trace), {}
    ids = sorted(trace.droppable | set(trace.saved))
    for _ in range(data.draw(st.integers(1, 8))):
        picked = data.draw(st.lists(st.sampled_from(ids), max_size=5))
        change = {v: data.draw(st.sampled_from(choices(trace, v))) for v in picked}
        what = data.draw(st.sampled_from(("change", "undo", "trial")))
        if what == "trial":
            before = simulator.bytes_at().copy()
            found = simulator.trial(change)
            there = before.copy()
            for first, end, n_bytes in found.segments:
                there[first:end] += n_bytes
            assert np.array_equal(there, Simulator(trace, actions | change).bytes_at())
            assert np.array_equal(simulator.bytes_at(), before)
            continue
        simulator.change(change)
        if what == "undo":
            simulator.undo()
        else:
            actions |= change
        same(simulator, Simulator(trace, actions))


@pytest.mark.parametrize("trace", TRACES)
def test_what_moves_out_frees_its_bytes_between_its_ticks(trace):
    plain = Simulator(trace)
    for value in trace.saved:
        if not facts_of(trace)[value].movable:
            continue
        made = scheduled(trace, {value: Offload("host")})
        action = made[value]
        assert min(action.out_at, action.gone_by) >= 0
        found = Simulator(trace, made)
        needed, until = found.needed(value)
        record = trace.storages[trace.values[value].storage]
        gone, back = max(record.end, action.gone_by), min(action.back_at, needed) if needed is not None else until + 1
        difference = found.bytes_at() - plain.bytes_at()
        want = np.zeros(trace.n_ticks, dtype=int)
        if needed is not None:
            want[gone + 1 : back] = -record.n_bytes
        assert np.array_equal(difference, want), value
        assert needed is None or action.back_at in bells_of(trace) or action.back_at == needed


def of_kind(kind):
    return next(v for v in RECORDED.saved if kind in facts_of(RECORDED)[v].kinds)


@pytest.mark.parametrize(("codec", "kind", "share"), [("mask", "two_valued", 32), ("short", "index", 4)])
def test_a_codec_leaves_its_share(codec, kind, share):
    value = of_kind(kind)
    n_bytes = RECORDED.value_bytes(value)
    assert away_bytes(RECORDED, value, (codec,)) == -(-n_bytes // share)
    simulator = Simulator(RECORDED)
    trial = simulator.trial({value: Compress((codec,))})
    assert min(level for _, _, level in trial.segments) == -(n_bytes - -(-n_bytes // share))
    cost = next(c for c in COSTS if c.name == codec)
    calls_s = {"mask": 0.0, "short": 3e-3}[codec]
    assert trial.seconds == pytest.approx(n_bytes * (cost.encode_s_per_byte + cost.decode_s_per_byte) + calls_s)


def test_a_sign_alone_is_not_what_a_replay_reads():
    """Where something that was made from the value is recomputed, the value itself is kept."""
    value = of_kind("sign_only")
    readers = [op.outputs[0] for op in RECORDED.ops if value in op.inputs and not op.backward]
    dropped = next(v for v in readers if v in RECORDED.droppable and RECORDED.values[v].saves)
    both = Simulator(RECORDED, {value: Compress(("sign",)), dropped: RECOMPUTE})
    kept = Simulator(RECORDED, {dropped: RECOMPUTE})
    assert np.array_equal(both.bytes_at(), kept.bytes_at())


def test_a_codec_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="needs 'two_valued'"):
        Simulator(RECORDED, {of_kind("index"): Compress(("mask",))})
    with pytest.raises(ConfigError, match="no cost of codec 'int4'"):
        Simulator(RECORDED, {of_kind("float"): Compress(("int4",))})
    with pytest.raises(ConfigError, match="no link to 'moon'; its links: host, disk"):
        Simulator(RECORDED, {of_kind("float"): Offload("moon")})


def test_staging_buffers_are_there_as_soon_as_a_link_is_used():
    trace = graph_trace(chain([4] * 6)).with_machine(LINKS)
    first, second = [v for v in trace.saved if facts_of(trace)[v].movable][:2]
    late = trace.n_ticks - 1
    one = Simulator(trace, {first: Offload("disk", (), 0, late, late)})
    two = Simulator(trace, {v: Offload("disk", (), 0, late, late) for v in (first, second)})
    assert one.bytes_at()[0] == two.bytes_at()[0] == Simulator(trace).bytes_at()[0] + 3


def test_what_a_byte_costs_of_the_steps_computing_counts_both_ways_without_a_wait():
    trace = graph_trace(chain([4] * 6))
    value = next(v for v in trace.saved if facts_of(trace)[v].movable)
    actions = {value: Offload("disk", (), 0, 1, 2)}
    fast, busy = (
        Simulator(trace.with_machine([Link("disk", 1e9, 1e9, busy_s_per_byte=cost)]), actions).timeline()
        for cost in (0.0, 0.25)
    )
    assert busy.seconds - fast.seconds == pytest.approx(2 * 4 * 0.25)
    assert busy.transfers.waits_s == pytest.approx(fast.transfers.waits_s, abs=1e-6)
    assert busy.peak_bytes == fast.peak_bytes
    assert busy.transfers.starts_s[-1] == pytest.approx(busy.seconds)
