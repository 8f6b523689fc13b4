"""The tape sleeps while modules run in which its plan has nothing to do."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.steps import step_peak_bytes
from ctdr_lightning.basics.torch_private import n_dispatch_modes
from ctdr_lightning.memory import RECOMPUTE, Tape, record
from ctdr_lightning.memory.plans.regions import Regions
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from tests.memory.harness import Bench, everything_dropped, planned, random_actions
from tests.memory.leaks import assert_nothing_is_installed
from tests.memory.programs import exact, mlp
from tests.virtual_cuda.card import Card

X = torch.ones(3, 16)


def seen(net, tape, step):
    """Whether a dispatch mode is on the stack at the end of each module's forward; the step's loss."""
    found = []
    hooks = [m.register_forward_hook(lambda *_: found.append(n_dispatch_modes())) for m in net]
    with tape:
        loss = step(net)
    for hook in hooks:
        hook.remove()
    return [n > 0 for n in found], loss


def dropping(trace, module):
    value = next(v for v in trace.saved if trace.module_of(v).endswith(module))
    return planned(trace, {value: RECOMPUTE})


def step(net):
    return net(X).square().sum()


def test_only_modules_with_something_to_do_are_seen():
    net = mlp(16, 16, 16, 16, 16)
    bench = Bench(net, step)
    want, made = bench.run(), on_gpu(dropping(bench.record(), "4"))
    awake, loss = seen(net, tape := Tape(made), step)
    assert [i for i, on in enumerate(awake) if on] == [3, 4]  # what makes it and the Tanh itself, not who saves it too
    assert not tape.diverged
    loss.backward()
    assert not bench.run(Tape(made)).differs_from(want)
    assert_nothing_is_installed()


def test_a_plan_that_is_busy_everywhere_is_not_told_of_modules():
    net = mlp(16, 16, 16)
    trace = Bench(net, lambda net: net(X).exp().sum()).record()
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    with Tape(planned(trace, everything_dropped(trace))):
        assert not hooks
    with Tape(dropping(trace, "1")):
        assert hooks
    assert not hooks


def test_a_budget_for_steps_that_differ_keeps_it_awake():
    net = mlp(16, 16, 16, 16, 16)
    made = dropping(Bench(net, step).record(), "4")
    assert all(seen(net, Tape(made, Evictor(10**9)), step)[0])


@pytest.fixture
def allocator(monkeypatch):
    """A GPU's allocator, which tells what is live, played by the meter."""
    meter = PeakMeter()
    Card(base_bytes=1000, live=meter.live).install(monkeypatch)
    return meter


def on_gpu(made):
    timeline = replace(made.timeline, trace=replace(made.trace, device="cuda"))
    return replace(made, timeline=timeline)


def test_where_an_allocator_counts_it_sleeps_under_a_budget_too(allocator):
    net = mlp(16, 16, 16, 16, 16)
    bench = Bench(net, step)
    want, made = bench.run(), on_gpu(dropping(bench.record(), "4"))
    awake, loss = seen(net, tape := Tape(made, Evictor(10**9)), step)
    assert [i for i, on in enumerate(awake) if on] == [3, 4]
    loss.backward()
    assert not tape.diverged
    assert not bench.run(Tape(made, Evictor(10**9))).differs_from(want)


def test_a_step_that_differs_is_evicted_by_what_the_allocator_says(allocator):
    net = mlp(16, 16, 16, 16, 16)
    made = on_gpu(dropping(Bench(net, step).record(), "4"))
    surprise = Bench(net, lambda net: net(torch.ones(64, 16)).square().sum())
    want, evictor = surprise.run(), Evictor(1)
    with allocator:
        assert not surprise.run(tape := Tape(made, evictor)).differs_from(want)
    assert tape.diverged
    assert evictor.evictions


class Overwriting(nn.Module):
    """Writes unnoticed over what a replay will read, in a module where nothing is dropped."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(16, 16), nn.Sigmoid(), Scale()

    def forward(self, x):
        self.last = self.a(x) + 1  # alive in the backward, so that the replay of b would read it as it is then
        unnoticed = self.last.data
        out = self.b(self.last)
        self.scale(unnoticed)
        return out.sum()


class Scale(nn.Module):
    def forward(self, x):
        x.mul_(2)


def test_a_write_over_what_a_replay_reads_is_seen():
    net = Overwriting()
    exact(net, lambda net: net(X))
    made = dropping(record(lambda: net(X)), "b")
    assert Regions(made.script).busy == [False, False, True, True, True]  # before all, the whole, a, b, scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))

    def forward(self, x):
        return (x + self.body(x)).relu()


@pytest.mark.slow
def test_the_peak_is_the_predicted_one_where_modules_are_nested():
    """A value may be saved several modules later, with no op in between."""
    net = nn.Sequential(nn.Conv2d(4, 4, 1), *[nn.Sequential(Block()) for _ in range(4)])
    images = torch.randn(64, 4, 4, 4)

    def step(net):
        return net(images).square().sum()

    trace = Bench(net, step).record()
    outputs = {v: RECOMPUTE for v in trace.saved if trace.ops[trace.values[v].op].name == "aten.relu.default"}
    for actions in (outputs, *(random_actions(trace, seed) for seed in range(6))):
        made = planned(trace, actions)

        def run(made=made):
            with Tape(made) as tape:
                loss = step(net)
            assert not tape.diverged
            loss.backward()

        measured = step_peak_bytes(net, run)
        assert 0.98 * measured <= made.peak_bytes - trace.resident_bytes <= 1.02 * measured


def test_modes_of_the_program_stay_where_they_are():
    net = mlp(16, 16, 16, 16, 16)

    def counted(net):
        hidden = net[:5](X)
        with FlopCounterMode(display=False) as counter:
            out = net[5:](hidden).square().sum()
        assert counter.get_total_flops() > 0
        return out

    exact(net, counted)
    bench = Bench(net, counted)
    want = bench.run()
    for module in ("1", "4", "7", "10"):
        assert not bench.run(Tape(dropping(bench.record(), module))).differs_from(want)
        assert_nothing_is_installed()


def test_an_exception_in_a_quiet_module_leaves_nothing_behind():
    net = mlp(16, 16, 16, 16, 16)
    made = dropping(Bench(net, step).record(), "4")
    net[9].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), Tape(made):
        net(X)
    assert_nothing_is_installed()


def test_without_known_regions_everything_is_seen():
    net = mlp(16, 16, 16)
    made = dropping(Bench(net, step).record(), "1")
    ops = tuple(replace(op, region=-1) for op in made.trace.ops)
    blind = planned(replace(made.trace, ops=ops), made.actions)
    assert Regions(made.script).worthwhile
    assert all(seen(net, Tape(blind), step)[0])


def test_a_step_that_differs_is_seen_to_its_end():
    net = mlp(16, 16, 16, 16, 16)
    made = dropping(Bench(net, step).record(), "1")
    larger = torch.ones(5, 16)
    awake, loss = seen(net, tape := Tape(made), lambda net: net(larger).square().sum())
    assert "made (5, 16), the plan expects (3, 16)" in tape.diverged
    assert all(awake)
    loss.backward()
    assert_nothing_is_installed()


class Shifted(nn.Module):
    """Adds a buffer early; in some steps writes to it late, among modules that a light plan does not touch."""

    def __init__(self, width):
        super().__init__()
        self.first, self.rest = mlp(16, 16, width), mlp(width, 16, 16, 16, 16)
        self.register_buffer("shift", torch.ones(3, width))
        self.writes = False

    def forward(self, x):
        hidden = self.rest[:9]((self.first(x) + self.shift).exp())
        if self.writes:
            self.shift.mul_(2)
        return self.rest[9:](hidden)


@pytest.mark.parametrize("width", [16, 2048], ids=["a buffer that is copied", "a buffer that keeps the tape awake"])
def test_a_write_that_the_recorded_step_did_not_make(width):
    net = Shifted(width)
    bench = Bench(net, step)
    trace = bench.record()
    net.writes = True
    want = bench.run()
    for value in [v for v in trace.saved if v in trace.droppable]:
        made = planned(trace, {value: RECOMPUTE})
        assert not bench.run(Tape(made)).differs_from(want), trace.ops[trace.values[value].op]
