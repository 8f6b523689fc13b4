"""What the tests of hard programs share: small nets, inputs, and the check itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn

from tests.memory.harness import Bench, check, noise

X = noise(6, 16, seed=1)
IMAGES = noise(4, 3, 12, 12, seed=2)


def mlp(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with tanh and dropout between these widths."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


def exact(
    model: nn.Module,
    step: Callable[[nn.Module], Tensor],
    backward: Callable[[Tensor], None] | None = None,
    seeds: int = 4,
) -> None:
    """Check the step of a model in training mode."""
    check(Bench(model.train(), step, backward), seeds)
