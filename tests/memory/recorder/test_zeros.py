"""Shares of zeros are recorded on request: of values that may have many, as they are, with one read of all counts."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctdr_lightning.memory import Session, Trace, plan, record, record_fake
from ctdr_lightning.memory.codecs.zvc import n_kept
from ctdr_lightning.memory.traces.facts import facts_of
from tests.memory.harness import noise


def net(*, inplace=False):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(inplace), nn.Conv2d(6, 8, 3), nn.ReLU6(inplace), nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(100, 5), nn.ReLU(inplace), nn.Linear(5, 2),
    )  # fmt: skip


def seen_by_hooks(module, x):
    """The share of zeros in the output of each ReLU and pooling, in order."""
    found = []
    for layer in module:
        x = layer(x)
        if isinstance(layer, (nn.ReLU, nn.ReLU6, nn.MaxPool2d)):
            found.append((x == 0).double().mean().item())
    return found


def shares(trace):
    return [v.zeros for v in trace.values if v.zeros]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("inplace", [False, True])
def test_shares_are_those_of_the_contents(inplace, memory_format):
    x = noise(2, 3, 18, 18, seed=0).contiguous(memory_format=memory_format)
    trace = record(lambda: net(inplace=inplace)(x).square().sum(), zeros=True)
    with torch.no_grad():
        want = seen_by_hooks(net(), x)
    assert len(want) == 4
    assert shares(trace) == pytest.approx(want)
    assert Trace.from_json(trace.to_json()) == trace
    asked = {v for v in trace.saved if "zeros" in facts_of(trace)[v].kinds}
    assert asked == {i for i, v in enumerate(trace.values) if v.zeros}, "what is counted is what the codec is for"


def test_nobody_looks_unasked():
    assert not shares(record(lambda: net()(noise(2, 3, 18, 18, seed=0)).square().sum()))


@pytest.mark.parametrize("width", [1, 2**22 + 3])
def test_all_elements_count_and_a_negative_zero_is_kept(width):
    flat = torch.zeros(width, dtype=torch.bfloat16)
    flat[-1] = -0.0
    assert n_kept(flat) == 1


def test_a_view_that_is_saved_first_stands_for_the_whole_value():
    x = torch.tensor([[-1.0, 2.0], [-3.0, -4.0]], requires_grad=True)

    def step():
        with torch.no_grad():
            y = F.relu(x.detach())
        return (y[0] * x[0]).sum() + (y * x).sum()

    trace = record(step, zeros=True)
    assert shares(trace) == [0.75]


@pytest.mark.parametrize("step", [lambda x: F.gelu(x), lambda x: F.max_pool1d(x, 2), lambda x: x.abs() * 0])
def test_other_values_are_not_looked_at(step):
    x = noise(2, 3, 8, seed=0).requires_grad_()
    assert not shares(record(lambda: step(x).square().sum(), zeros=True))


def test_a_value_that_nobody_saves_is_not_looked_at():
    x = noise(4, 4, seed=0).requires_grad_()
    assert not shares(record(lambda: (F.hardtanh(x) + 1).sum() + F.relu(x.detach()).sum(), zeros=True))


def test_an_empty_batch_has_no_share():
    x = torch.zeros(0, 3, requires_grad=True)
    assert not shares(record(lambda: F.relu(x).sum(), zeros=True))


def test_steps_are_the_same_and_fakes_have_no_zeros():
    module, x = net(), noise(2, 3, 18, 18, seed=0)
    trace = record(lambda: module(x).square().sum(), zeros=True)
    want = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    other = record(lambda: module(x).square().sum(), budget_bytes=60_000, zeros=True)
    assert all(map(torch.equal, want, (p.grad for p in module.parameters())))
    assert shares(other) == shares(trace)
    assert not shares(record_fake(module, x, lambda module, x: module(x).square().sum()))


def test_all_counts_are_read_at_once(monkeypatch):
    """On a GPU each read of a number waits for all work so far."""
    reads = []

    def counted(name):
        before = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self: reads.append(name) or before(self))

    module, x = net(), noise(2, 3, 18, 18, seed=0)
    for name in ("tolist", "item", "__int__", "__float__", "__bool__"):
        counted(name)
    record(lambda: module(x).square().sum())
    unasked = len(reads)
    record(lambda: module(x).square().sum(), zeros=True)
    assert len(reads) - 2 * unasked == 1


def test_a_session_is_asked_as_a_recording_is():
    module, x, found = net(), noise(2, 3, 18, 18, seed=0), []
    session = Session(lambda trace: found.append(trace) or plan(trace, policy="keep"), zeros=True)
    session.begin("step")
    loss = module(x).square().sum()
    session.forward_done()
    loss.backward()
    session.end()
    assert len(shares(found[0])) == 4
