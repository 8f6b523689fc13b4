"""Recurrent layers on fake tensors keep what a processor's kernel keeps."""

import pytest
import torch
from torch import nn

from ctdr_lightning import record
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.simulator.simulator import Simulator


def step(net, x):
    return net(x)[0].square().mean()


def kept(trace):
    """Bytes that each recurrent layer makes."""
    return [
        [trace.value_bytes(v) for v in op.outputs] for op in trace.ops if op.name == "aten.mkldnn_rnn_layer.default"
    ]


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("batch", "width", "layers"), [(64, 128, 2), (3, 20, 1)])
def test_the_workspace_is_that_of_the_real_kernel(make, batch, width, layers):
    torch.manual_seed(0)
    net, x = make(16, width, layers, batch_first=True), torch.randn(batch, 16, 16)
    step(net, x).backward()  # oneDNN's first call on weights lays them out anew
    net.zero_grad()
    real, fake = record(lambda: step(net, x)), record_fake(net, x, step)
    assert kept(fake) == kept(real)
    assert (len(kept(real)) == layers) is (make is nn.LSTM)
    assert Simulator(fake).peak_bytes == pytest.approx(Simulator(real).peak_bytes, rel=0.02)


def test_nothing_is_kept_where_no_gradient_is_wanted():
    net, x = nn.Sequential(nn.LSTM(16, 32)), torch.randn(5, 4, 16)
    head = nn.Linear(32, 1)

    def frozen(net, x):
        with torch.no_grad():
            features = net[0](x)[0]
        return net[1](features).sum()

    net.append(head)
    ((*_, workspace_bytes),) = kept(record_fake(net, x, frozen))
    assert workspace_bytes == 0
