import pytest
import torch
from torch import nn

from ctdr_lightning.basics.torch_private import n_dispatch_modes
from ctdr_lightning.memory import RECOMPUTE, Session, Simulator, plan, signature_of
from ctdr_lightning.memory.guide.events import Differed, OverBudget, PlanMade
from ctdr_lightning.memory.guide.step_guide import MAX_DIVERGENCES
from ctdr_lightning.memory.values.live_bytes import PeakMeter, active_trackers
from tests.memory.harness import Bench, everything_dropped, planned
from tests.memory.leaks import assert_nothing_is_installed, left_behind


def planner(trace):
    return planned(trace, everything_dropped(trace))


def make_net():
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(),
    )  # fmt: skip


def run(session, net, batch, way=None, *, meter=False):
    """One step as a training loop runs it; the gradients, buffers and RNG state that it leaves."""
    net.zero_grad(set_to_none=True)
    session.begin(signature_of(batch, net), meter=meter)
    loss = (way or (lambda x: net(x).square().mean()))(batch)
    session.forward_done()
    loss.backward()
    session.end()
    return [p.grad for p in net.parameters() if p.grad is not None] + [*net.buffers(), torch.get_rng_state()]


class Idle:
    """A session that does nothing."""

    def begin(self, signature, meter=False):
        pass

    forward_done = end = lambda self: None


def both(sessions, steps):
    """What the same steps leave with each session."""
    left = []
    for session in sessions:
        torch.manual_seed(0)
        net = make_net()
        left.append([[t.clone() for t in run(session, net, *step)] for step in steps])
    return left


@pytest.mark.parametrize("budget_bytes", [None, 3000])
def test_first_measured_then_guided_always_exact(budget_bytes):
    sizes = (6, 6, 6, 3, 6, 3, 3)
    batches = [(torch.randn(n, 8),) for n in sizes]
    session = Session(planner, budget_bytes=budget_bytes)
    plain, guided = both([Idle(), session], batches)
    for want, got in zip(plain, guided, strict=True):
        assert all(map(torch.equal, want, got))
    plans = [event for event in session.events if isinstance(event, PlanMade)]
    foreseen = [event for event in plans if event.foreseen]
    assert len(plans) - len(foreseen) == 2, "one a kind of step"
    assert len(foreseen) == (budget_bytes is not None)
    over = [event for event in session.events if isinstance(event, OverBudget)]
    assert len(over) <= (budget_bytes is not None)
    assert len(session.events) == len(plans) + len(over)
    assert_nothing_is_installed()


def test_a_step_is_recorded_first_and_then_runs_under_its_plan():
    session, net, batch = Session(planner), make_net(), torch.randn(6, 8)
    session.begin(signature_of(batch, net))
    assert session.plan is None
    assert n_dispatch_modes() == 1
    session.abort()
    run(session, net, batch)
    assert session.trace is not None
    assert session.plan is not None
    session.begin(signature_of(batch, net))
    assert n_dispatch_modes() == 1
    net(batch)
    session.forward_done()
    assert_nothing_is_installed()
    session.abort()


def test_a_plan_that_keeps_everything_installs_nothing():
    session, net, batch = Session(lambda trace: plan(trace, policy="keep")), make_net(), torch.randn(6, 8)
    run(session, net, batch)
    session.begin(signature_of(batch, net))
    assert_nothing_is_installed()
    session.end()


def test_a_step_that_differs_is_exact_and_measured_anew():
    net, batch = make_net(), torch.randn(6, 8)
    session = Session(planner, budget_bytes=4000)
    run(session, net, batch)
    first = session.trace

    def longer(x):
        return (net(x).cos() + 1).log().square().mean()

    bench = Bench(net, lambda net: longer(batch))
    want = bench.run()
    bench.reset()
    run(session, net, batch, longer)
    assert not bench.outcome(want.tensors["loss"]).differs_from(want)
    assert isinstance(session.events[-1], Differed)
    assert session.plan is None
    run(session, net, batch, longer)
    assert session.trace is not first
    assert len(session.trace.ops) > len(first.ops)
    assert session.plan is not None
    run(session, net, batch, longer)
    assert sum(isinstance(event, Differed) for event in session.events) == 1


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_steps_without_a_plan_are_kept_under_the_budget_backward_included(share, in_step):
    layers = (layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)))
    net, batch = nn.Sequential(*layers), torch.randn(64, 16)

    def peak(step, session=None):
        net.zero_grad(set_to_none=True)
        with PeakMeter() as meter:
            if session is not None:
                session.begin(signature_of(batch, net))
            loss = step(batch)
            if in_step:
                loss.backward()
            if session is not None:
                session.forward_done()
            if not in_step:
                loss.backward()
            if session is not None:
                session.end()
        return meter.live.peak

    budget_bytes = int(share * peak(lambda x: net(x).square().mean()))
    session = Session(lambda trace: plan(trace, budget_bytes), budget_bytes=budget_bytes)
    assert peak(lambda x: net(x).square().mean(), session) <= budget_bytes
    assert peak(lambda x: net(x.neg()).square().mean(), session) <= budget_bytes
    assert isinstance(session.events[-1], Differed)


def test_patience_with_steps_that_always_differ():
    net, batch = make_net(), torch.randn(6, 8)
    session = Session(planner, budget_bytes=4000)
    for i in range(4 * MAX_DIVERGENCES):
        run(session, net, batch, (lambda x: net(x).cos().mean()) if i % 2 else None)
    assert sum(isinstance(event, PlanMade) for event in session.events) == MAX_DIVERGENCES + 1
    assert session.plan is not None


@pytest.mark.parametrize("steps_before", [0, 1])
def test_abort_leaves_everything(steps_before):
    net, batch = make_net(), torch.randn(6, 8)
    session = Session(planner, budget_bytes=4000)

    def fail():
        session.begin(signature_of(batch, net), meter=True)
        net(batch)
        session.abort()

    for _ in range(steps_before):
        run(session, net, batch)
    objects, n_bytes = left_behind(fail)
    assert not objects
    assert n_bytes == 0
    assert_nothing_is_installed()
    assert not active_trackers()
    run(session, net, batch)
    assert session.plan is not None


@pytest.mark.parametrize("steps_before", [0, 1], ids=["recorded", "under a plan"])
def test_a_step_that_failed_in_its_forward_is_known_to_have_reached_no_more_than_the_forward(steps_before):
    net, batch = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]), torch.randn(256, 64)
    session = Session(planner, budget_bytes=2**30)
    run(session, net, batch)
    whole = session.plan
    session = session if steps_before else Session(planner, budget_bytes=2**30)
    session.begin(signature_of(batch, net))
    net[:2](batch)
    session.abort()
    reached = session.reached_bytes
    assert 0 < reached <= whole.forward_peak_bytes < whole.peak_bytes
    session.abort()
    assert session.reached_bytes == reached


def test_a_forgotten_step_is_aborted_by_the_next():
    net, batch = make_net(), torch.randn(6, 8)
    session = Session(planner)
    session.begin(signature_of(batch, net))
    net(batch)
    run(session, net, batch)
    assert_nothing_is_installed()


def test_steps_leave_nothing_behind():
    net, batch = make_net(), torch.randn(6, 8)
    session = Session(planner, budget_bytes=4000)
    objects, n_bytes = left_behind(lambda: run(session, net, batch))
    assert not objects
    assert n_bytes == 0


def test_the_measured_peak_is_the_predicted_one():
    net = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(32, 32), nn.Tanh())])
    batch = torch.randn(128, 32)
    session = Session(lambda trace: plan(trace, policy="sqrt"))
    run(session, net, batch)
    net.zero_grad(set_to_none=True)
    run(session, net, batch, meter=True)
    predicted = session.plan.peak_bytes - session.trace.resident_bytes
    assert session.measured_peak_bytes == pytest.approx(predicted, rel=0.02)


def test_replan_makes_all_plans_again():
    net, session = make_net(), Session(planner)
    for n in (6, 3):
        run(session, net, torch.randn(n, 8))
    session.replan(lambda trace: plan(trace, policy="keep"))
    assert session.plan.keeps_all
    session.begin(signature_of(torch.randn(6, 8), net))
    assert session.plan.keeps_all
    session.end()


def test_an_infeasible_plan_leaves_nothing_installed():
    net, batch = make_net(), torch.randn(6, 8)

    def refuse(trace):
        Simulator(trace, dict.fromkeys(trace.droppable, RECOMPUTE))
        raise ValueError("nothing fits")

    session = Session(refuse)
    with pytest.raises(ValueError, match="nothing fits"):
        run(session, net, batch)
    assert_nothing_is_installed()


def test_signatures():
    net, x = make_net(), torch.randn(4, 8)
    same = signature_of({"x": x, "n": 3}, net)
    assert same == signature_of({"x": torch.zeros(4, 8), "n": 4}, net)
    assert hash(same) == hash(signature_of({"x": x, "n": 3}, net))
    others = [
        signature_of({"x": x[:3], "n": 3}, net),
        signature_of({"x": x.double(), "n": 3}, net),
        signature_of({"y": x, "n": 3}, net),
        signature_of({"x": x, "n": "3"}, net),
        signature_of({"x": x, "n": 3}),
    ]
    with torch.no_grad():
        others.append(signature_of({"x": x, "n": 3}, net))
    net[1].eval()
    others.append(signature_of({"x": x, "n": 3}, net))
    net[1].train()
    net[0].requires_grad_(False)
    others.append(signature_of({"x": x, "n": 3}, net))
    assert len({same, *others}) == len(others) + 1
