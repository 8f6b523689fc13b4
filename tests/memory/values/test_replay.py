import gc
import sys

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.torch_private import DispatchKey, TorchDispatchMode, is_key_excluded, n_dispatch_modes
from ctdr_lightning.memory import RECOMPUTE, RECOMPUTE_EACH, Tape, record
from ctdr_lightning.memory.values import replay as engine
from ctdr_lightning.memory.values.live_bytes import LiveBytes, PeakMeter
from ctdr_lightning.memory.values.replay import materialize, unpack
from ctdr_lightning.memory.values.value import Handle, Held
from ctdr_lightning.memory.values.value_table import ValueTable
from tests.memory.harness import Bench, everything_dropped, planned
from tests.memory.leaks import engine_objects
from tests.memory.values.test_value_table import run

aten = torch.ops.aten


def chain(n, x, func=aten.sin.default):
    """The last value of a chain of calls, all of whose tensors are gone."""
    table, h = ValueTable(), x
    for _ in range(n):
        _, h = run(table, func, h)
    return table.find(h)


def test_a_deep_chain_needs_no_python_stack():
    x = torch.randn(4)
    n = 3 * sys.getrecursionlimit()
    want = x
    for _ in range(n):
        want = want.sin()
    assert torch.equal(materialize(chain(n, x)), want)


def test_a_deep_graph_dies_without_the_collector():
    gc.disable()
    try:
        before = engine_objects()
        value = chain(3 * sys.getrecursionlimit(), torch.randn(4))
        assert engine_objects() - before
        del value
        assert not engine_objects() - before
    finally:
        gc.enable()


def test_temporaries_are_freed_at_their_last_use():
    x = torch.randn(1000)
    value = chain(50, x)
    with LiveBytes() as live:
        materialize(value)
    assert live.peak == 2 * x.nbytes


def test_awaited_values_on_the_way_are_kept():
    table, x = ValueTable(), torch.randn(4)
    _, a = run(table, aten.exp.default, x)
    _, b = run(table, aten.sin.default, a)
    _, c = run(table, aten.cos.default, b)
    cached, each, target = table.find(a), table.find(b), table.find(c)
    handles = [Handle(v) for v in (cached, each, target)]
    each.stays_while_awaited = False
    want = c.clone()
    del a, b, c
    assert torch.equal(unpack(handles[2]), want)
    assert cached.node is None
    assert torch.equal(cached.get(), x.exp())
    assert each.tensor is None
    assert torch.equal(unpack(handles[1]), x.exp().sin())


def test_a_replay_sees_neither_autograd_nor_autocast_nor_modes():
    class Loud(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    a = torch.randn(3, 3, requires_grad=True)
    table = ValueTable()
    _, y = run(table, aten.mm.default, a, a)
    value, want = table.find(y), y.clone()
    del y
    with torch.autocast("cpu"), Loud():
        again = materialize(value)
    assert again.dtype is torch.float32
    assert not again.requires_grad
    assert torch.equal(again, want)
    assert torch.is_grad_enabled()


def test_the_layout_and_dtype_of_a_write_in_place_come_back():
    table, x = ValueTable(), torch.randn(3, 4)
    _, y = run(table, aten.clone.default, x.t())
    y = y.to(torch.bfloat16)
    table = ValueTable()
    _, y = run(table, aten.clone.default, y)
    _, y = run(table, aten.add_.Tensor, y, torch.randn(4, 3))
    value, want = table.find(y), y.clone()
    stride = y.stride()
    del y
    again = materialize(value)
    assert again.stride() == stride
    assert again.dtype is torch.bfloat16
    assert torch.equal(again, want)


def test_what_was_written_in_place_is_refused():
    x = torch.ones(3)
    held, value = Held(x), chain(2, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        unpack(held)
    with pytest.raises(RuntimeError, match="modified in place"):
        materialize(value)


@pytest.mark.parametrize(("action", "n"), [(RECOMPUTE, 4), (RECOMPUTE_EACH, 4 + 2 * (3 + 2 + 1))])
def test_each_value_is_made_again_once_or_each_time(action, n, monkeypatch):
    """The last activation is unpacked once, by its own layer, the others also by the layer after."""
    calls = []
    again = engine.call_again
    monkeypatch.setattr(engine, "call_again", lambda func, *rest: calls.append(func) or again(func, *rest))
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
    x = torch.randn(5, 8)
    bench = Bench(net, lambda net: net(x).sum())
    trace = bench.record()
    plan = planned(trace, dict.fromkeys(everything_dropped(trace), action))
    bench.run(Tape(plan))
    times = [calls.count(func) for func in (aten.addmm.default, aten.tanh.default)]
    assert times == [n, n]


def test_an_exception_in_a_replay_leaves_nothing_installed(monkeypatch):
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(5, 8)
    bench = Bench(net, lambda net: net(x).sum())
    want = bench.run()
    plan = planned(trace := bench.record(), everything_dropped(trace))

    def fail(func, args, kwargs):
        raise MemoryError("full")

    monkeypatch.setattr(engine, "call_again", fail)
    with pytest.raises(MemoryError, match="full"):
        bench.run(Tape(plan))
    monkeypatch.undo()
    assert n_dispatch_modes() == 0
    assert torch.is_grad_enabled()
    assert not is_key_excluded(DispatchKey.AutogradCPU)
    assert not bench.run(Tape(plan)).differs_from(want)


def test_the_meter_counts_what_replays_take():
    x = torch.randn(1000)
    value = chain(3, x)
    with PeakMeter() as meter:
        materialize(value)
    assert meter.live.peak == 2 * x.nbytes


def test_records_can_be_made_inside_records():
    trace = record(lambda: torch.ones(2, requires_grad=True).exp().sum())
    assert [op.name for op in trace.ops][:2] == ["aten.ones.default", "aten.exp.default"]
