"""Teachers, still or moving; and what the engine refuses, and how."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning.memory import Tape, record
from tests.memory.harness import Bench, everything_dropped, planned
from tests.memory.programs import X, exact, mlp

# -- teachers ---------------------------------------------------------------------------------------------------------


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(16, 16, 8, dropout=0.2), mlp(16, 16, 8, dropout=0.2)
        self.teacher.requires_grad_(False)

    def forward(self, guard):
        with guard:
            goal = self.teacher(X)
        return F.mse_loss(self.student(X).exp(), goal.exp()) + (self.student(X) * goal.clone()).tanh().sum()

    @torch.no_grad()
    def move_teacher(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def move_teacher_unnoticed(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


@pytest.mark.parametrize("guard", [torch.no_grad, nullcontext])
def test_teacher(guard):
    exact(Distilled(), lambda net: net(guard()))


@pytest.mark.parametrize("how", ["move_teacher", "move_teacher_unnoticed"])
def test_teacher_that_moves_before_the_backward(how):
    def step(net):
        loss = net(torch.no_grad())
        getattr(net, how)()
        return loss

    exact(Distilled(), step, seeds=8)


def test_teacher_that_moves_between_forward_and_backward():
    net = Distilled()

    def backward(loss):
        net.move_teacher()
        loss.backward()

    exact(net, lambda net: net(torch.no_grad()), backward)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_an_update_that_the_plan_does_not_know_is_refused():
    net = Distilled().train()
    trace = Bench(net, lambda net: net(torch.no_grad())).record()
    with Tape(planned(trace, everything_dropped(trace))):
        loss = net(torch.no_grad())
    net.move_teacher()
    with pytest.raises(RuntimeError, match="modified in place after the forward pass read it"):
        loss.backward()


def test_a_write_that_autograd_refuses_is_right_where_it_is_accepted():
    x = torch.randn(4, requires_grad=True)

    def step(write):
        h = x.sin().exp()
        out = h.sum()
        if write:
            with torch.no_grad():
                h.zero_()
        return out

    trace = record(lambda: step(write=False))
    (want,) = torch.autograd.grad(step(write=False), x)
    with pytest.raises(RuntimeError, match="inplace operation"):
        step(write=True).backward()
    x.grad = None
    with Tape(planned(trace, everything_dropped(trace))):
        loss = step(write=True)
    loss.backward()
    assert torch.equal(x.grad, want)
