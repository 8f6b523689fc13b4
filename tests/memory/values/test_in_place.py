"""Writes in place, noticed or not, and views: exact."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.memory.programs import X, exact, mlp

# -- writes in place --------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        y = self.norm(self.a(x)).relu_()
        z = self.b(y).add_(y).mul_(0.5)
        z = F.dropout(z, 0.3, inplace=True)
        z = self.c(z.clone())
        z.masked_fill_(z > 1, 0.25)
        z[:, 3] = 2.0
        z[:, 4:6] += y[:, :2].detach()
        z.unsqueeze_(0).transpose_(1, 2)
        w = torch.zeros_like(z).copy_(z.sigmoid()).index_add_(0, torch.tensor([0]), z)
        w.clamp_(max=3).squeeze_(0)
        return w.exp().add(0).t_().mul_(w.t().tanh()).sum()


def test_writes_in_place():
    exact(InPlace(), lambda net: net(X), seeds=8)


def test_writes_in_place_of_another_dtype():
    net = mlp(16, 16)

    def step(net):
        y = net(X).to(torch.bfloat16)
        y += net(X).exp()
        y.mul_(torch.tensor(1.5, dtype=torch.float64))
        return y.sin().float().sum()

    exact(net, step)


def test_results_written_to_given_tensors():
    net = mlp(16, 16)

    def step(net):
        y = net(X)
        with torch.no_grad():
            buffer = torch.zeros(6, 16)
            scale = buffer.add(1).exp()
            torch.add(y.detach(), 1, out=buffer)
            torch._foreach_mul_([buffer, scale], 2.0)
        return (y * buffer * scale).tanh().sum()

    exact(net, step)


def test_statistics_written_between_two_uses():
    """BatchNorm writes its running statistics without a sign: what evaluation mode read of them must stay."""
    norm = nn.BatchNorm1d(16)
    net = nn.Sequential(mlp(16, 16), norm, nn.Tanh())

    def step(net):
        norm.eval()
        calm = net(X).exp()
        norm.train()
        return (calm * net(X * 3).sigmoid()).sum()

    exact(net, step, seeds=8)


def test_parametrizations_with_buffers():
    net = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        nn.InstanceNorm1d(6, track_running_stats=True, affine=True),
    )
    exact(net, lambda net: net(X).exp().sum())


# -- writes that autograd does not notice -----------------------------------------------------------------------------


def test_weights_clamped_through_data_after_their_use():
    net = mlp(16, 16, 16)

    def step(net):
        y = net(X).exp()
        for weight in net.parameters():
            weight.data.clamp_(-0.1, 0.1)
        return (y * net(X)).sum()

    exact(net, step, seeds=8)


def test_activations_written_through_data():
    net = mlp(16, 16, 16)

    def step(net):
        y = net[0](X)
        h = y.sigmoid()
        g = h.exp()
        h.data.mul_(2)
        y.data.view(-1).add_(1)
        return (g * h * y.sin() * net[3](h)).sum()

    exact(net, step, seeds=8)


def test_another_storage_given_through_data():
    net = mlp(16, 16)

    def step(net):
        y = net[0](X)
        h = y.exp()
        h.data = h.data.sign()
        return (h.cos() * y.tanh()).sum()

    exact(net, step, seeds=8)


# -- views ------------------------------------------------------------------------------------------------------------


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=1)
        parts = self.out(q * k).split([3, 5, 8], dim=1)
        joined = torch.cat([parts[1].t().contiguous().t(), parts[2], parts[0].flip(1)], 1)
        wide = joined.unsqueeze(1).expand(-1, 4, -1) * v.reshape(6, 1, 16)
        slid = wide.exp().as_strided((6, 4, 8), (64, 16, 2))
        odd = wide.contiguous()[:, 1:].as_strided((6, 8), (64, 1), storage_offset=5)
        own = v.clone()
        own[1:, ::2].mul_(odd[1:].detach())
        own.diagonal().add_(1)
        windows = own.unfold(1, 4, 2).sigmoid()
        return slid.sin().sum() + odd.tanh().sum() + own.exp().sum() + windows.square().sum()


def test_views_and_strides():
    exact(Views(), lambda net: net(X), seeds=8)


def test_views_without_autograd_of_their_base():
    net = mlp(16, 16)

    def step(net):
        y = net[0](X)
        h = y.view(3, 32).t()
        h.mul_(2)
        return (y.exp() * h.t().reshape(6, 16).sin()).sum()

    exact(net, step)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, 16)
            self.body, self.head = mlp(16, 16), nn.Linear(16, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.body(self.words(ids)))

    ids = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(0))
    exact(Tied(), lambda net: F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()))
