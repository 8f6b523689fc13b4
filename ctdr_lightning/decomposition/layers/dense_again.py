"""Factorized layers back to dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.layers.attention import close_attention
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import replace_everywhere, walk
from ctdr_lightning.decomposition.layers.tied import TiedLayer


def merge(model: nn.Module) -> nn.Module:
    """Turn every factorized layer back into its dense form, in place.

    The outputs stay those of the factorized model. Weights that were tied are tied again, and attentions hold their
    projections fused again.

    Returns:
        The same model.

    Raises:
        ConfigError: If ``model`` itself is a factorized layer, which has no parent to be replaced in.

    Example:
        >>> from torch import nn
        >>> from ctdr_lightning import decompose
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> _ = decompose(model, rank=0.25, progress=False)
        >>> merge(model)[0]
        Linear(in_features=64, out_features=64, bias=True)
    """
    if isinstance(model, FactorizedLayer):
        raise ConfigError("merge(model): model is itself a factorized layer.", "Use model.to_dense().")
    make_dense(model, lambda name: True)
    close_attention(model, lambda name: True)
    return model


def make_dense(model: nn.Module, chosen: Callable[[str], bool]) -> None:
    """Make the factorized layers dense whose names are chosen, and with them the layers tied to them.

    Args:
        model: Any module, changed in place.
        chosen: Told the dotted name of a factorized layer.
    """
    layers = list(walk(model))
    swaps: dict[nn.Module, nn.Module] = {
        layer: layer.to_dense() for name, layer in layers if isinstance(layer, FactorizedLayer) and chosen(name)
    }
    for _, layer in layers:
        if isinstance(layer, TiedLayer) and layer.owner in swaps:
            owner: Any = swaps[layer.owner]
            swaps[layer] = layer.to_dense(owner.weight)
    replace_everywhere(model, swaps)
