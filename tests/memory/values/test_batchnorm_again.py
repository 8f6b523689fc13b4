"""BatchNorm is run again from its statistics, to the bit, wherever that gives the same bits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.memory import RECOMPUTE, Tape, Trace, record, record_fake, simulate
from ctdr_lightning.memory.values import batchnorm_again as shortcuts
from ctdr_lightning.memory.values import replay
from ctdr_lightning.memory.values.batchnorm_again import ShortcutTimes, has_shortcut, normalise_again
from tests.memory.harness import Bench, everything_dropped, planned
from tests.memory.programs import exact

aten = torch.ops.aten
X = torch.randn(4, 6, 5, 5)
PARAMETERS = st.sampled_from([None, torch.float32, torch.float64])


def train(x, weight=None, bias=None):
    return aten.native_batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-5)


def shortens(x, weight=None, bias=None):
    return has_shortcut(aten.native_batch_norm.default, (x, weight, bias, None, None, True), train(x, weight, bias))


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(
    batch=st.integers(2, 9),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    last=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    parameters=st.tuples(PARAMETERS, PARAMETERS),
    seed=st.integers(0, 99),
)
def test_where_there_is_a_shortcut_it_gives_the_same_bits(batch, sizes, last, dtype, parameters, seed):
    torch.manual_seed(seed)
    shape = (batch, *sizes)
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    x = x.contiguous(memory_format=layout) if last else x
    weight, bias = (None if kind is None else torch.randn(shape[1]).to(kind) for kind in parameters)
    try:
        out, mean, invstd = train(x, weight, bias)
    except RuntimeError:
        return  # dtypes that torch does not take together
    if shortens(x, weight, bias):
        again = normalise_again(x, weight, bias, mean, invstd)
        assert torch.equal(out, again)
        assert out.stride() == again.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_usual_layers_have_a_shortcut(dtype, layout):
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    assert shortens(X.to(dtype).contiguous(memory_format=layout), torch.rand(6, dtype=kind), torch.rand(6, dtype=kind))


def test_others_have_none():
    few = torch.rand(6, dtype=torch.bfloat16)
    assert not shortens(X[..., ::2])
    assert not shortens(X.bfloat16(), few, few), "the scale would be rounded"
    evaluated = (X, None, None, torch.zeros(6), torch.ones(6), False)
    assert not has_shortcut(aten.native_batch_norm.default, evaluated, train(X))
    assert not has_shortcut(aten.native_layer_norm.default, (X,), train(X))


def net_and_step():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Tanh()
    )
    images = torch.randn(16, 3, 32, 32)
    return net, lambda net: net(images).square().sum()


def norms(trace):
    return [op for op in trace.ops if op.name == "aten.native_batch_norm.default"]


def test_the_trace_knows_it(monkeypatch):
    monkeypatch.setattr(shortcuts, "_share", lambda *_: 0.25)
    net, step = net_and_step()
    trace = Bench(net, step).record()
    for op in norms(trace):
        assert op.replay_share == 0.25
        assert [bool(trace.values[v].pin) for v in op.outputs] == [False, True, True]
    assert {op.replay_share for op in trace.ops if op not in norms(trace)} == {1.0}
    first = trace.ops.index(norms(trace)[0])
    assert trace.replay_seconds(first) < trace.ops[first].seconds + trace.python_s_per_replay
    assert Trace.from_json(trace.to_json()) == trace
    with pytest.raises(CheckpointError, match="the replay share of an op"):
        Trace.from_json(replace(trace, ops=tuple(replace(op, replay_share=1.5) for op in trace.ops)).to_json())


def test_the_simulator_charges_it(monkeypatch):
    monkeypatch.setattr(shortcuts, "_share", lambda *_: 0.25)
    net, step = net_and_step()
    trace = Bench(net, step).record()
    whole = trace.with_costs(
        [op.seconds for op in trace.ops], {}, trace.python_s_per_replay, dict.fromkeys(range(len(trace.ops)), 1.0)
    )
    actions = everything_dropped(trace)
    assert simulate(trace, actions).recompute_seconds < simulate(whole, actions).recompute_seconds
    assert simulate(trace, actions).peak_bytes == simulate(whole, actions).peak_bytes


def test_a_fake_step_pins_the_same():
    net, _ = net_and_step()
    images = torch.randn(16, 3, 32, 32)
    real = record(lambda: net(images).square().sum())
    fake = record_fake(net, images, lambda net, images: net(images).square().sum())
    assert [v.pin for v in fake.values] == [v.pin for v in real.values]
    assert {op.replay_share for op in fake.ops} == {1.0}


def replayed(monkeypatch, made, bench):
    """What a guided step runs again; its outcome."""
    found, again = [], replay.call_again
    monkeypatch.setattr(replay, "call_again", lambda func, *rest: found.append(func) or again(func, *rest))
    return found, bench.run(Tape(made))


def test_the_tape_takes_it(monkeypatch):
    net, step = net_and_step()
    bench = Bench(net, step)
    want, trace = bench.run(), bench.record()
    found, outcome = replayed(monkeypatch, planned(trace, everything_dropped(trace)), bench)
    assert found.count(normalise_again) == 2
    assert aten.native_batch_norm.default not in found
    assert not outcome.differs_from(want)


def test_without_its_statistics_the_whole_op_runs_again(monkeypatch):
    net, step = net_and_step()
    bench = Bench(net, step)
    want, trace = bench.run(), bench.record()
    free = replace(trace, values=tuple(replace(v, pin="" if "again" in v.pin else v.pin) for v in trace.values))
    found, outcome = replayed(monkeypatch, planned(free, dict.fromkeys(free.saved, RECOMPUTE)), bench)
    assert found.count(aten.native_batch_norm.default) >= 2
    assert normalise_again not in found
    assert not outcome.differs_from(want)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8).bfloat16(),
        nn.InstanceNorm2d(8, affine=True),
        nn.SyncBatchNorm(8),
    ],
    ids=lambda norm: f"{type(norm).__name__} {norm.extra_repr()}",
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_kind_of_layer_stays_exact(norm, layout):
    dtype = next((p.dtype for p in norm.parameters()), torch.float32)
    images = torch.randn(4, 3, 9, 9).to(dtype).contiguous(memory_format=layout)
    net = nn.Sequential(nn.Conv2d(3, 8, 3).to(dtype), norm, nn.ReLU(), nn.Conv2d(8, 4, 3).to(dtype)).to(
        memory_format=layout
    )
    exact(net, lambda net: net(images).float().square().sum(), seeds=2)


def test_where_memory_does_not_suffice_nothing_is_measured(monkeypatch):
    times = ShortcutTimes()
    assert times.note(2, aten.relu.default, (X,), X) == ""
    assert times.note(3, aten.native_batch_norm.default, (X, None, None, None, None, True, 0.1, 1e-5), train(X))
    assert times.shares().keys() == {3}
    assert 0 < times.shares()[3] <= 1
    monkeypatch.setattr(shortcuts, "_share", lambda *_: torch.empty(2**60))
    assert times.shares() == {}
