from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.torch_private import n_dispatch_modes, top_saved_tensors_hooks
from ctdr_lightning.memory import RECOMPUTE, RECOMPUTE_EACH, Recorder, Tape, plan, record
from ctdr_lightning.memory.tape import tape as tape_module
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.values.live_bytes import PeakMeter, active_trackers
from tests.memory.harness import Bench, everything_dropped, planned, random_actions
from tests.memory.leaks import assert_nothing_is_installed, engine_objects, left_behind


def net_and_bench(batch=4, **options):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    images = torch.randn(batch, 3, 8, 8)
    return net, Bench(net, lambda net: net(images).square().mean(), **options)


def guards(bench, trace):
    """Every way to run a step with the engine, by name."""
    dropped = planned(trace, everything_dropped(trace))
    budget_bytes = bench.peak_bytes() // 2
    return {
        "sqrt": lambda: Tape(plan(trace, policy="sqrt")),
        "everything": lambda: Tape(dropped),
        "each": lambda: Tape(planned(trace, dict.fromkeys(everything_dropped(trace), RECOMPUTE_EACH))),
        "random": lambda: Tape(planned(trace, random_actions(trace, 2))),
        "budget": lambda: Tape(dropped, Evictor(budget_bytes)),
        "recorder": lambda: Recorder(),
        "online": lambda: Recorder(evictor=Evictor(budget_bytes)),
    }


GUARDS = ("sqrt", "everything", "each", "random", "budget", "recorder", "online")


# -- what is installed ------------------------------------------------------------------------------------------------


def test_a_plan_that_keeps_everything_installs_nothing():
    net, bench = net_and_bench()
    kept = plan(bench.record(), policy="keep")
    assert kept.keeps_all
    with Tape(kept, Evictor(1)) as tape:
        assert_nothing_is_installed()
        assert not active_trackers()
        net(torch.randn(2, 3, 8, 8))
    assert not tape.diverged


@pytest.mark.parametrize("guard", GUARDS)
def test_everything_installed_leaves_again(guard):
    net, bench = net_and_bench()
    make = guards(bench, bench.record())[guard]
    with make(), listening(net) as heard:
        assert n_dispatch_modes() == 1
        bench.step(net)
    assert any(heard)
    assert_nothing_is_installed()
    assert not active_trackers()


@contextmanager
def listening(net):
    """Whether saved-tensor hooks are on the stack after each module's forward."""
    heard = []
    hooks = [
        module.register_forward_hook(lambda *_: heard.append(top_saved_tensors_hooks(True) is not None))
        for module in net
    ]
    yield heard
    for hook in hooks:
        hook.remove()


def test_it_listens_only_while_something_is_dropped():
    net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Tanh())])
    bench = Bench(net, lambda net: net(torch.ones(2, 8)).sum())
    trace = bench.record()
    dropped = next(v for v in trace.saved if trace.module_of(v).endswith("9"))
    with Tape(planned(trace, {dropped: RECOMPUTE})), listening(net) as heard:
        loss = bench.step(net)
    loss.backward()
    assert [i for i, on in enumerate(heard) if on] == [9, 10]  # the Tanh saves its own output, the Linear its input


# -- exceptions -------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


class StopInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors
        raise Stop


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("where", ["forward", "backward", "backward inside the block"])
def test_an_exception_leaves_nothing_behind(guard, where):
    net, bench = net_and_bench()
    want = bench.run()
    make = guards(bench, bench.record())[guard]
    images = torch.randn(4, 3, 8, 8)

    def fail():
        try:
            with make():
                hidden = net[:5](images)
                if where == "forward":
                    hook = net[6].register_forward_hook(stop)
                    try:
                        net[5:](hidden)
                    finally:
                        hook.remove()
                loss = net[5:](StopInBackward.apply(hidden)).sum()
                if where != "backward":
                    loss.backward()
            loss.backward()
        except Stop:
            return
        raise AssertionError("nothing was raised")

    objects, n_bytes = left_behind(fail)
    assert not objects
    assert n_bytes == 0
    assert_nothing_is_installed()
    assert not active_trackers()
    assert not bench.run(make(), around=guard in ("recorder", "online")).differs_from(want)


# -- leaks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", GUARDS)
def test_steps_leave_nothing_behind(guard):
    net, bench = net_and_bench()
    make = guards(bench, bench.record())[guard]
    images = torch.randn(4, 3, 8, 8)

    def step():
        tape = make()
        with tape:
            loss = net(images).square().mean()
            if guard in ("recorder", "online"):
                loss.backward()
        if isinstance(tape, Recorder):
            tape.trace()
        else:
            loss.backward()

    objects, n_bytes = left_behind(step)
    assert not objects
    assert n_bytes == 0


@pytest.mark.parametrize("guard", GUARDS)
def test_a_forward_without_a_backward_leaves_nothing_behind(guard):
    net, bench = net_and_bench()
    make = guards(bench, bench.record())[guard]

    def step():
        with make():
            net(torch.zeros(4, 3, 8, 8))

    objects, n_bytes = left_behind(step)
    assert not objects
    assert n_bytes == 0


def test_live_bytes_return_to_the_baseline():
    _, bench = net_and_bench()
    tape = Tape(planned(trace := bench.record(), everything_dropped(trace)))
    with PeakMeter() as meter:
        bench.run(tape)
        bench.reset()
    assert meter.live.now == 0
    assert not engine_objects()


# -- using it ---------------------------------------------------------------------------------------------------------


def test_a_tape_serves_many_steps():
    _, bench = net_and_bench()
    want = bench.run()
    tape = Tape(plan(bench.record(), policy="sqrt"))
    for _ in range(3):
        assert not bench.run(tape).differs_from(want)
        assert not tape.diverged


@pytest.mark.parametrize("guard", ["sqrt", "everything", "budget"])
def test_the_backward_may_run_inside_the_block(guard):
    _, bench = net_and_bench()
    want = bench.run()
    make = guards(bench, bench.record())[guard]
    tape = make()
    assert not bench.run(tape, around=True).differs_from(want)
    assert not tape.diverged


def test_gradient_accumulation():
    net, bench = net_and_bench()
    parts = torch.randn(3, 4, 3, 8, 8)

    def accumulate(tapes):
        bench.reset()
        losses = []
        for part, tape in zip(parts, tapes, strict=True):
            with tape:
                losses.append(net(part).square().mean())
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]

    trace = bench.record()
    kept, dropped = plan(trace, policy="keep"), planned(trace, everything_dropped(trace))
    want = accumulate([Tape(kept) for _ in parts])
    got = accumulate([Tape(dropped), Tape(plan(trace, policy="sqrt")), Tape(dropped)])
    assert all(map(torch.equal, want, got))


def test_no_grad_inside_a_tape():
    net, bench = net_and_bench()
    tape = Tape(planned(trace := bench.record(), everything_dropped(trace)))
    with tape, torch.no_grad():
        net(torch.randn(4, 3, 8, 8))
    assert not engine_objects()


def test_it_lowers_the_peak():
    net = nn.Sequential(*[m for _ in range(16) for m in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(256, 64)
    bench = Bench(net, lambda net: net(x).square().mean())
    tape = Tape(plan(bench.record(), policy="sqrt"))
    plain = bench.peak_bytes()
    with PeakMeter() as meter:
        bench.run(tape)
    weights = sum(p.nbytes for p in net.parameters())
    assert meter.live.peak - weights < 0.6 * (plain - weights)


@pytest.mark.slow
def test_a_thousand_steps_of_changing_shapes_leave_nothing_behind():
    net, bench = net_and_bench()
    tape = Tape(planned(trace := bench.record(), everything_dropped(trace)), Evictor(bench.peak_bytes() // 2))
    sizes = iter(range(10**6))

    def step():
        bench.model.zero_grad(set_to_none=True)
        with tape:
            loss = net(torch.randn(2 + next(sizes) % 7, 3, 8, 8)).square().mean()
        loss.backward()
        bench.model.zero_grad(set_to_none=True)

    objects, n_bytes = left_behind(step, times=1000)
    assert not objects
    assert n_bytes == 0
    assert next(sizes) > 1000


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_under_a_budget_the_device_is_asked_for_the_segments_that_plans_count_on(budget, monkeypatch):
    asked = []
    monkeypatch.setattr(tape_module, "use_expandable_segments", asked.append)
    net, x = nn.Linear(4, 4), torch.ones(2, 4)
    with Tape(plan(record(lambda: net(x).sum()), budget)):
        net(x).sum().backward()
    assert asked == ([torch.device("cpu")] if budget else [])
