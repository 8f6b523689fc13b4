"""Fake tensors of a processor: workspaces of recurrent layers, layouts of BatchNorm, selections by values."""

import pytest
import torch
from torch import nn

from ctdr_lightning import record
from ctdr_lightning.basics.errors import ConfigError
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


class Normed(nn.Module):
    """BatchNorm over the last side, as in time series; its result's layout decides which products follow."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), norm, nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x).transpose(1, -1)).transpose(1, -1)).relu()


@pytest.mark.parametrize(
    ("norm", "shape"),
    [(nn.BatchNorm1d, (8, 12, 16)), (nn.BatchNorm2d, (4, 5, 6, 16)), (nn.BatchNorm3d, (4, 3, 3, 3, 16))],
)
def test_batch_norm_lays_out_as_the_real_kernel(norm, shape):
    net, x = Normed(norm(16)), torch.randn(shape)
    real, fake = record(lambda: net(x).square().mean()), record_fake(net, x, lambda n, x: n(x).square().mean())
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert Simulator(fake).peak_bytes == Simulator(real).peak_bytes


def by_mask(hidden, labels):
    return hidden[labels >= 0]


def by_place(hidden, labels):
    (places,) = torch.where(labels >= 0)
    return hidden[places]


def by_value(hidden, labels):
    return hidden.masked_select(labels[:, None] >= 0).reshape(-1, 8)


@pytest.mark.parametrize("selected", [by_mask, by_place, by_value])
def test_a_selection_is_as_large_as_it_may_be_where_that_is_asked_for(selected):
    net, x = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 512)), torch.randn(64, 16)

    def step(net, batch):
        return net[1](selected(net[0](batch[0]), batch[1])).square().mean()

    with pytest.raises(ConfigError, match="needs the values of tensors"):
        record_fake(net, (x, torch.ones(64)), step)
    fake = record_fake(net, (x, torch.ones(64)), step, reads_values=True)
    peaks = []
    for labels in (torch.ones(64), torch.arange(64) - 32):
        net.zero_grad()
        peaks.append(Simulator(record(lambda labels=labels: step(net, (x, labels)))).peak_bytes)
    assert Simulator(fake).peak_bytes == peaks[0] > peaks[1]
