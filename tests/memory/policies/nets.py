"""Small nets as policies meet them: chains, residual sums, dense joins, attention, recurrence, no chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import nets
from tests.memory.harness import Bench
from tests.memory.zoo import build


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x), inplace=True)


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width * (i + 1)), nn.ReLU(), nn.Conv2d(width * (i + 1), width, 3, padding=1))
            for i in range(n_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


class Woven(nn.Module):
    """Two streams that read each other at every step, so that no single value ever separates before from after."""

    def __init__(self, width: int, n_steps: int) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(n_steps))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(n_steps))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, x.flip(0)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = torch.tanh(left(b)) + a, torch.sigmoid(right(a)) + b
        return a * b


def _bench(made: nets.Net) -> Bench:
    net, inputs, step = made
    return Bench(net.train(), lambda net: step(net, inputs))


def _mean(net: nn.Module, *shape: int) -> Bench:
    inputs = torch.randn(*shape)
    return Bench(net.train(), lambda net: net(inputs).square().mean())


def _dense() -> Bench:
    stem = nn.Conv2d(3, 8, 3, padding=1)
    return _mean(nn.Sequential(stem, Dense(8, 5), nn.Conv2d(48, 8, 1), Dense(8, 4)), 4, 3, 12, 12)


def _small_t() -> Bench:
    return _mean(nn.Sequential(*(nets.Attention(32, 4) for _ in range(3))), 2, 24, 32)


def _residual() -> Bench:
    stem = nn.Conv2d(3, 8, 3, padding=1)
    return _mean(nn.Sequential(stem, *(Residual(8) for _ in range(6)), nn.Flatten(), nn.Linear(2048, 4)), 4, 3, 16, 16)


CONFORMANCE: dict[str, Callable[[], Bench]] = {
    "R": lambda: _bench(nets.net_r(batch=2)),
    "T": _small_t,
    "RN18": lambda: _bench(nets.net_rn18(batch=1, size=16)),
    "residual": _residual,
    "GPT-2": lambda: Bench(*build("gpt2")),
    "DenseNet-like": _dense,
    "no chain": lambda: _mean(Woven(16, 6), 32, 16),
    "LSTM": lambda: Bench(*build("lstm")),
}
LONG = {"R", "RN18", "GPT-2", "DenseNet-like", "no chain"}


def bench_of(name: str) -> Bench:
    """A net by name, always with the same weights."""
    torch.manual_seed(0)
    return CONFORMANCE[name]()


def quick(names: Iterable[str]) -> list[Any]:
    """Names of nets for a parameter; those on which planning takes long are for the slow suite."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in names]
