"""Weights that no layer kind covers: they stay as they are, and the report names them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import walk
from ctdr_lightning.decomposition.shapes.layer_kinds import kind_of

# Below 1 % of a model's parameters no weight keeps a share from being reached: positions, class tokens, gates.
LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Uncovered:
    """A weight that is no layer's: a bare parameter of a model's own module, such as fused experts.

    Args:
        name: Dotted name in the model.
        shape: Its shape.
        parameters: Its entries.
    """

    name: str
    shape: tuple[int, ...]
    parameters: int


def uncovered_weights(model: nn.Module) -> tuple[Uncovered, ...]:
    """The weights of at least two axes and 1 % of a model's parameters that no registered layer kind covers.

    Args:
        model: Any module; its attentions open, so that their projections are layers.

    Returns:
        The weights, the largest first.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> model.experts = nn.Parameter(torch.zeros(2, 4, 4))
        >>> uncovered_weights(model)
        (Uncovered(name='experts', shape=(2, 4, 4), parameters=32),)
    """
    covered: set[int] = set()
    for _, module in walk(model):
        if isinstance(module, FactorizedLayer) or kind_of(module):
            covered |= {id(parameter) for parameter in module.parameters()}
    named = [(name, p) for name, p in model.named_parameters() if not isinstance(p, nn.UninitializedParameter)]
    least = LEAST_SHARE * sum(parameter.numel() for _, parameter in named)
    found = [
        Uncovered(name, tuple(parameter.shape), parameter.numel())
        for name, parameter in named
        if id(parameter) not in covered and parameter.ndim > 1 and parameter.numel() >= least
    ]
    return tuple(sorted(found, key=lambda weight: -weight.parameters))
