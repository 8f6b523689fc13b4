"""Operators that compile themselves run under a recording, a plan and the online policy, to the bit."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from ctdr_lightning.memory import Recorder, Tape, plan
from ctdr_lightning.memory.tape.online import Evictor
from tests.memory.harness import Bench
from tests.memory.leaks import assert_nothing_is_installed


def flexible():
    """On a processor torch has no backward for flex attention: it attends to what needs no gradient."""
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(6, 16)

    def step(net):
        hidden = net(x)
        heads = hidden.detach().view(1, 2, 6, 8)
        return (hidden + flex_attention(heads, heads, heads).view(6, 16)).exp().mean()

    return Bench(net, step)


def test_flex_attention():
    bench = flexible()
    want = bench.run()
    trace = bench.record()
    assert not bench.run(Tape(plan(trace, policy="sqrt"))).differs_from(want)
    assert not bench.run(Recorder(evictor=Evictor(1)), around=True).differs_from(want)
    assert_nothing_is_installed()
