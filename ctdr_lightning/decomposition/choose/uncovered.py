"""Weights that stay as they are, whatever share is asked for: the report names them, and they may leave too little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import walk
from ctdr_lightning.decomposition.shapes.layer_kinds import kind_of

# Below 1 % of a model's parameters no weight keeps a share from being reached: positions, class tokens, gates.
LEAST_SHARE = 0.01
# A share of layers that hold less than this of a model would save next to nothing: a classifier behind an LSTM holds
# 0.5 %, and a quarter of it is a rank of 2 for ten classes, 98 -> 50 % of them right.
LEAST_OPEN = 0.05
NO_KIND, NOT_SELECTED = "no layer kind covers it", "not selected"


@dataclass(frozen=True)
class StayingWeight:
    """A weight that is not open to decomposition: of a layer that is left alone, or a model's own bare parameter.

    Args:
        name: Dotted name in the model.
        shape: Its shape.
        parameters: Its entries.
        reason: Why it stays.
    """

    name: str
    shape: tuple[int, ...]
    parameters: int
    reason: str = NO_KIND


def staying_weights(model: nn.Module, reasons: Mapping[str, str]) -> tuple[StayingWeight, ...]:
    """The weights of at least two axes that are not open to decomposition.

    Args:
        model: Any module; its attentions open, so that their projections are layers.
        reasons: Why each layer that was looked at stays, by name; empty where it is open.

    Returns:
        The weights, the largest first.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> model.experts = nn.Parameter(torch.zeros(2, 4, 4))
        >>> staying_weights(model, {"0": ""})
        (StayingWeight(name='experts', shape=(2, 4, 4), parameters=32, reason='no layer kind covers it'),)
    """
    why: dict[int, str] = {}
    for name, module in walk(model):
        if isinstance(module, FactorizedLayer) or kind_of(module):
            reason = "" if isinstance(module, FactorizedLayer) else reasons.get(name, NOT_SELECTED)
            for parameter in module.parameters():
                why.setdefault(id(parameter), reason)
    found = [
        StayingWeight(name, tuple(parameter.shape), parameter.numel(), reason)
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, nn.UninitializedParameter) and parameter.ndim > 1
        if (reason := why.get(id(parameter), NO_KIND))
    ]
    return tuple(sorted(found, key=lambda weight: -weight.parameters))


def without_crumbs(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """The layers; all closed where together they hold under 5 % of the model's parameters.

    Args:
        model: Any module.
        layers: Its layers, of which a share of the parameters is to be left.
    """
    n_open = sum(layer.geometry.n_weights for layer in layers if layer.geometry is not None and not layer.refusal)
    n_all = sum(p.numel() for p in model.parameters() if not isinstance(p, nn.UninitializedParameter))
    if n_open >= LEAST_OPEN * n_all or any(isinstance(layer.module, FactorizedLayer) for layer in layers):
        return list(layers)
    why = f"all that can be cut is {n_open / n_all:.1%} of the model's parameters (select= insists)"
    return [layer if layer.refusal else replace(layer, refusal=why) for layer in layers]
