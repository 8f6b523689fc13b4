"""Steps that differ from their plan: noticed, said in words, and exact."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning.memory import Tape, record
from ctdr_lightning.memory.tape.online import Evictor
from tests.memory.harness import Bench, everything_dropped, planned, random_actions


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x, way="first"):
        h = self.drop(self.norm(self.a(x)).relu_())
        if way == "longer":
            h = self.c(h.sigmoid()).tanh()
        h = self.b(h).exp() if way != "other" else self.b(h).cos()
        return (h if way == "shorter" else self.c(h).tanh()).square().mean()


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda net: net(torch.ones(5, 8)), "made (5, 8), the plan expects (6, 8)"),
        (lambda net: net(torch.ones(6, 8), "longer"), "the plan expects"),
        (lambda net: net(torch.ones(6, 8), "other"), "cos"),
        (lambda net: net(torch.ones(6, 8), "shorter"), "the plan expects"),
        (lambda net: net.eval()(torch.ones(6, 8)), "the plan expects"),
        (lambda net: net.a(torch.ones(6, 8)).exp().sum(), "the plan expects"),
        (lambda net: net(torch.ones(6, 8)) + net(torch.ones(6, 8)), "the plan expects"),
        (lambda net: F.linear(net.a.weight, net.b.weight).sum(), "the plan expects"),
    ],
)
def test_a_step_that_differs_is_noticed_and_exact(change, says, budget):
    torch.manual_seed(0)
    net = Choosy().train()
    planned_for = Bench(net, lambda net: net(torch.ones(6, 8)))
    trace = planned_for.record()
    surprise = Bench(net, change)
    want = surprise.run()
    net.train()
    for dropped in (everything_dropped(trace), random_actions(trace, 1)):
        tape = Tape(planned(trace, dropped), Evictor(1) if budget else None)
        assert not surprise.run(tape).differs_from(want)
        assert tape.diverged
        assert says in tape.diverged
        net.train()
    tape = Tape(planned(trace, everything_dropped(trace)))
    planned_for.run(tape)
    assert not tape.diverged


def test_a_step_that_ends_early_is_noticed():
    net = Choosy()
    trace = record(lambda: net(torch.ones(6, 8)))
    with Tape(planned(trace, everything_dropped(trace))) as tape:
        net.a(torch.ones(6, 8))
    assert "ended after" in tape.diverged


def test_an_exception_is_no_divergence():
    net = Choosy()
    trace = record(lambda: net(torch.ones(6, 8)))
    tape = Tape(planned(trace, everything_dropped(trace)))
    net.b.register_forward_hook(stop)
    with pytest.raises(Stop), tape:
        net(torch.ones(6, 8))
    assert not tape.diverged
