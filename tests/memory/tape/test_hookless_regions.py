"""Parts of a step that forbid saved-tensor hooks run as without an engine, and nothing in them is dropped."""

import pytest
import torch
from torch import nn
from torch.autograd import graph

from ctdr_lightning.memory import Session, plan, signature_of
from ctdr_lightning.memory.guide.events import Differed
from tests.memory.harness import Bench, check
from tests.memory.leaks import assert_nothing_is_installed

X = torch.linspace(-1, 1, 64).reshape(8, 8)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def apart(net):
    """A gradient of a function that has nothing to do with the weights."""
    hidden = net(X)
    slope = torch.func.grad(lambda t: (t.sin() * t).sum())(hidden.detach())
    return (net(slope) * hidden).mean()


def through(net):
    """A gradient that the backward goes through again."""
    hidden = net(X)
    slope = torch.func.grad(lambda t: (t.sin() * t).sum())(hidden)
    return (slope.tanh() * hidden).mean()


def jacobian(net):
    jacobian = torch.func.jacrev(net)(X[:2])
    return net(X).square().mean() + jacobian.square().mean()


def hessian(net):
    return net(X).mean() + torch.func.hessian(lambda t: net(t).square().sum())(X[0]).square().mean()


def per_sample(net):
    """Norms of gradients, one a sample, as differentially private training takes them."""
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights, row):
        return torch.func.functional_call(net, weights, (row,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X)
    norms = sum(each.flatten(1).square().sum(1) for each in found.values())
    return (net(X).square().mean(1) / norms.sqrt()).mean()


def vjp(net):
    out, back = torch.func.vjp(net, X)
    return (out * back(torch.ones_like(out))[0]).mean()


def asked_for(net):
    """Whoever asks for no hooks gets none, twice over, and afterwards they are there again."""
    hidden = net[:2](X)
    with graph.disable_saved_tensors_hooks("none here"):
        hidden = net[2](hidden)
        with graph.disable_saved_tensors_hooks("nor here"):
            hidden = net[3](hidden)
    return net[4](hidden).square().mean()


STEPS = [apart, through, jacobian, hessian, per_sample, vjp, asked_for]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_with_such_a_part_is_exact(step):
    before = graph.disable_saved_tensors_hooks
    check(Bench(make_net(), step), seeds=4)
    assert graph.disable_saved_tensors_hooks is before
    assert_nothing_is_installed()


@pytest.mark.parametrize("step", STEPS)
def test_such_a_step_in_a_session_under_a_budget(step):
    bench = Bench(make_net(), step)
    want, peak_bytes = bench.run(), bench.peak_bytes()
    static_bytes = sum(p.nbytes for p in bench.model.parameters())
    budget_bytes = static_bytes + peak_bytes
    session = Session(lambda trace: plan(trace, policy="sqrt"), budget_bytes=budget_bytes, static_bytes=static_bytes)
    for _ in range(3):
        bench.reset()
        session.begin(signature_of(X))
        loss = step(bench.model)
        session.forward_done()
        session.backward_begins(loss)
        loss.backward()
        session.end()
        assert not bench.outcome(loss).differs_from(want)
        del loss
    assert not any(isinstance(event, Differed) for event in session.events), session.events


def test_what_is_made_in_such_a_part_is_pinned():
    trace = Bench(make_net(), asked_for).record()
    pinned = [op.name for op in trace.ops if op.pin == "where torch allows no saved-tensor hooks"]
    assert "aten.addmm.default" in pinned
    assert "aten.tanh.default" in pinned
    assert sum(op.name == "aten.tanh.default" for op in trace.ops if not op.pin) == 1


def test_hooks_of_the_program_s_own_are_refused_as_ever():
    def step(net):
        with graph.save_on_cpu(), graph.disable_saved_tensors_hooks("none here"):
            return net(X).mean()

    with pytest.raises(RuntimeError, match="none here"):
        Bench(make_net(), step).record()
    assert_nothing_is_installed()
