"""Programs that are hard on an engine below autograd; each leaves what it leaves without one, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.memory.programs import IMAGES, X, exact, mlp

# -- numbers and layouts ----------------------------------------------------------------------------------------------


def test_autocast():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10))

    def step(net):
        with torch.autocast(X.device.type, dtype=torch.bfloat16):
            return F.cross_entropy(net(IMAGES), torch.tensor([0, 1, 2, 3]))

    exact(net, step)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)).to(dtype)
    exact(net, lambda net: net(IMAGES.to(dtype)).float().square().mean())


def test_channels_last():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.SiLU(),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    images = IMAGES.to(memory_format=torch.channels_last)
    exact(net, lambda net: net(images).square().mean())


def test_complex_numbers():
    net = mlp(16, 16)

    def step(net):
        waves = torch.fft.fft(net(X))
        mixed = waves * waves.conj() + waves.imag.neg() * 1j
        return mixed.abs().sum() + torch.view_as_real(waves.conj().resolve_conj()).exp().mean()

    exact(net, step)


def test_sparse_tensors():
    net = mlp(16, 16)
    matrix = torch.eye(6).to_sparse()

    def step(net):
        hidden = net(X)
        mixed = torch.sparse.mm((hidden.detach() @ hidden.detach().t()).to_sparse(), hidden.exp())
        return torch.sparse.mm(matrix, mixed).sin().sum()

    exact(net, step)


# -- other users of the same hooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside(use_reentrant):
    net = mlp(16, 16, 16, 16, dropout=0.3)

    def step(net):
        hidden = checkpoint(net[3:6], net[:3](X), use_reentrant=use_reentrant)
        return net[6:](hidden).exp().sum()

    exact(net, step)


def test_saved_tensors_hooks_inside():
    net = mlp(16, 16, 16, 16)

    def step(net):
        hidden = net[:3](X)
        with torch.autograd.graph.save_on_cpu():
            hidden = net[3:6](hidden)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            hidden = hidden.exp()
        return net[6:](hidden).square().sum()

    exact(net, step)


def test_vmap_and_functional_call():
    net = mlp(16, 16)

    def step(net):
        weights = {name: p * 1.5 for name, p in net.named_parameters()}
        out = torch.vmap(lambda row: torch.func.functional_call(net, weights, (row.unsqueeze(0),)))(X)
        return out.exp().sum()

    exact(net, step)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_modules(dynamic):
    torch._dynamo.reset()
    net = mlp(16, 16, 16)
    body = torch.compile(net[:3], backend="aot_eager", dynamic=dynamic)
    exact(net, lambda net: net[3:](body(X).exp()).square().sum())
