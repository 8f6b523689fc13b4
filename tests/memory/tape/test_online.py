import math

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.memory import Recorder, record, simulate
from ctdr_lightning.memory.simulator.evicted import EvictedSet
from ctdr_lightning.memory.tape.online import COSTS, Evictor, Online
from ctdr_lightning.memory.values import replay as engine
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.memory.values.op_seconds import op_seconds
from ctdr_lightning.memory.values.value_table import ValueTable
from tests.memory.harness import Bench
from tests.virtual_cuda.card import Card, Kernels


def deep(n):
    x = torch.randn(4096, requires_grad=True)

    def step():
        h = x
        for _ in range(n):
            h = h.sin()
        return h.sum()

    return x, step


def run(step, evictor):
    """Peak bytes and the number of ops that were run again."""
    calls = []
    again = engine.call_again

    def counting(*args):
        calls.append(args[0])
        return again(*args)

    engine.call_again = counting
    try:
        with PeakMeter() as meter, Recorder(evictor=evictor):
            step().backward()
    finally:
        engine.call_again = again
    return meter.live.peak, len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["eq", "full"])
def test_a_deep_chain_in_the_root_of_its_memory_at_a_linear_price(cost):
    """DTR's theorem 3.1: N layers with a budget of about sqrt(N) need O(N) extra ops; here 2 sqrt(N), at most 2 N."""
    for n in (64, 256, 1024):
        x, step = deep(n)
        budget_bytes = int(2 * math.sqrt(n)) * x.nbytes
        peak, extra = run(step, Evictor(budget_bytes, cost))
        assert peak <= budget_bytes
        assert extra <= 2 * n
        plain, none = run(step, Evictor(10**12, cost))
        assert none == 0
        assert plain >= n * x.nbytes


def test_a_budget_that_cannot_be_met_is_exact_all_the_same():
    net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU())])
    bench = Bench(net, lambda net: net(torch.ones(4, 16).cumsum(0)).square().sum())
    want = bench.run()
    for cost in ("eq", "full", "local"):
        evictor = Evictor(1, cost)
        assert not bench.run(Recorder(evictor=evictor), around=True).differs_from(want)
        assert evictor.evictions
        assert evictor.replayed


def test_without_pressure_nothing_is_evicted():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    evictor = Evictor(10**9)
    Bench(net, lambda net: net(torch.ones(4, 16)).sum()).run(Recorder(evictor=evictor), around=True)
    assert evictor.evictions == evictor.replayed == 0


def test_small_tensors_are_left_alone():
    """Under one percent of the mean size, evicting is not worth it."""
    x, tiny = torch.randn(100_000, requires_grad=True), torch.randn(4, requires_grad=True)
    evicted = []

    class Watching(Evictor):
        def evict(self, value):
            evicted.append(value.eviction.n_bytes)
            super().evict(value)

    def step():
        h, t = x, tiny
        for _ in range(20):
            h, t = h.sin(), t.sin()
        return h.sum() + t.sum()

    run(step, Watching(8 * x.nbytes))
    assert evicted
    assert min(evicted) == x.nbytes


def test_eviction_repeats_with_the_seed():
    x, step = deep(100)
    counts = []
    for _ in range(2):
        evictor = Evictor(10 * x.nbytes, "constant", seed=3)
        run(step, evictor)
        counts.append((evictor.evictions, evictor.replayed))
    assert counts[0] == counts[1]


@COSTS.register("constant")
def constant(candidate):
    return 1.0


def test_costs_by_name():
    assert {"eq", "full", "local"} <= set(COSTS)
    with pytest.raises(ValueError, match="DTR cost"):
        Evictor(1, "unknown")


def test_evicted_sets_share_their_costs():
    a, b, c = EvictedSet(1.0), EvictedSet(2.0), EvictedSet(4.0)
    a.join(b)
    c.join(b)
    a.join(c)
    assert a.root() is b.root() is c.root()
    assert a.root().cost == 7.0


def test_what_the_loss_alone_awaits_is_let_go_in_the_backward():
    """Masks of dropout can only be held; the program has the loss, and its calls, until the backward is over."""
    x = torch.randn(64, 4096, requires_grad=True)

    def step():
        h = x[0]
        for _ in range(24):
            h = nn.functional.dropout(h.sin(), 0.5)
        return h.sum()

    budget_bytes = x.nbytes + 16 * x[0].nbytes
    peak, _ = run(step, Evictor(budget_bytes))
    assert x.nbytes < peak <= budget_bytes


def test_a_product_larger_than_all_before_it_finds_room():
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 1024, requires_grad=True)

    def step():
        h = x
        for _ in range(24):
            h = h.sin()
        return (h @ weight).sum()

    large_bytes = 16 * x.nbytes
    evictor = Evictor(large_bytes + 6 * x.nbytes)
    peak, extra = run(step, evictor)
    assert large_bytes < peak <= evictor.budget_bytes
    assert extra, "values had to go"


def test_a_recorded_step_under_a_budget_gives_a_plan_makers_trace():
    """What the online policy does meanwhile is no part of the trace."""
    x, step = deep(30)
    plain = record(step)
    x.grad = None
    under = record(step, budget_bytes=12 * x.nbytes)
    assert [op.name for op in plain.ops] == [op.name for op in under.ops]
    assert plain.saved == under.saved
    assert simulate(under).peak_bytes == pytest.approx(simulate(plain).peak_bytes, rel=0.02)


def test_a_view_that_nobody_captured_can_be_evicted_too():
    """Where a step differs from its plan, the views from before were not seen."""
    table, evictor = ValueTable(), Evictor(10**9)
    x = torch.ones(4)
    node = table.capture(torch.ops.aten.exp.default, 0, (x,), {})
    with evictor:
        table.bind(node, y := x.exp())
        value = Online(evictor, table).pack(y[1:])
        del y
        assert value.node is not None
        assert value.tensor is not None
        evictor.budget_bytes = -1
        evictor.make_room()
        assert value.tensor is None
        assert torch.equal(evictor.fetch(value), x[1:].exp())


def test_costs_on_a_gpu_are_seconds_of_its_kernels(monkeypatch):
    aten, (small, large) = torch.ops.aten, (torch.ones(64, 64), torch.ones(1024, 1024))
    Card().install(monkeypatch)
    evictor = Evictor(1 << 40)
    evictor.on(torch.device("cuda", 0))
    costs = [evictor.cost_of(-1.0 - i, aten.mm.default, (x, x), {}, x) for i, x in enumerate((large, small))]
    assert costs == [op_seconds(DEVICES["a100"], aten.mm.default, (x, x), {}, x) for x in (large, small)]
    assert costs[0] > costs[1] > 0


def test_a_step_on_a_gpu_is_kept_under_its_budget_by_the_allocators_count(monkeypatch):
    card, device = Card(base_bytes=10**6).install(monkeypatch), torch.device("cuda", 0)
    x, step = deep(64)
    evictor = Evictor(20 * x.nbytes)
    recorder = Recorder(evictor=evictor)
    evictor.on(device)
    assert not evictor.counts
    with Kernels(card), recorder:
        step().backward()
    assert evictor.evictions
    assert card.peak_bytes - card.base_bytes <= evictor.budget_bytes


def test_a_step_on_the_processor_counts_itself_beside_a_gpu_in_use(monkeypatch):
    Card(base_bytes=10**6).install(monkeypatch)
    x, step = deep(64)
    evictor = Evictor(20 * x.nbytes)
    peak, _ = run(step, evictor)
    assert evictor.counts
    assert evictor.evictions
    assert peak <= evictor.budget_bytes


def test_the_first_op_on_a_gpu_finds_room_for_its_workspace(monkeypatch):
    Card(base_bytes=10**6).install(monkeypatch)
    evictor = Evictor(10**9)
    evictor.on(torch.device("cuda", 0))
    assert evictor.reserve_bytes == 5 * 10**7


def gradient(x, step, **options):
    """The gradient of a step whose ops run on a card of so many bytes, and its evictor."""
    x.grad, evictor = None, Evictor(1 << 40)
    with Kernels(Card(**options)), Recorder(evictor=evictor):
        step().backward()
    return x.grad, evictor


def test_where_the_allocator_has_no_block_values_are_evicted_and_the_op_runs_again(monkeypatch):
    """The budget counts bytes, and a GPU's allocator needs one block: on an H100 2 of 7.5 GiB lay in pieces."""
    x, step = deep(64)
    want, evictor = gradient(x, step)
    assert not evictor.evictions
    found, evictor = gradient(x, step, total_bytes=20 * x.nbytes)
    assert torch.equal(found, want)
    assert evictor.evictions
    assert evictor.excess_bytes == 0  # it is the allocator's limit that was reached
    monkeypatch.setattr(Evictor, "_give_up", lambda self: False)
    with pytest.raises(torch.OutOfMemoryError):
        gradient(x, step, total_bytes=20 * x.nbytes)


def test_memory_that_no_eviction_frees_runs_out():
    x, step = deep(64)
    with pytest.raises(torch.OutOfMemoryError):
        gradient(x, step, total_bytes=x.nbytes)


def test_an_op_that_wrote_before_memory_ran_out_does_not_run_again():
    evictor, total, calls = Evictor(1 << 40), torch.zeros(4), []

    def half_done(func, args, kwargs):
        calls.append(func(*args, **kwargs))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        evictor.attempt(torch.ops.aten.add_.Tensor, (total, torch.ones(4)), {}, half_done)
    assert len(calls) == 1
