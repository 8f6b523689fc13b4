"""The model's layers as data: which are factorized, set as a state dict has them, before its weights load."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import nn

from ctdr_lightning.decomposition.layers.attention import close_attention
from ctdr_lightning.decomposition.layers.dense_again import make_dense
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.from_checkpoint import NOTE, rebuild_from_state_dict
from ctdr_lightning.decomposition.layers.surgery import walk


def match_structure(module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "", *_: Any) -> None:
    """Make a module's layers factorized or dense as they are in a state dict. A load-state-dict pre-hook.

    Args:
        module: Changed in place.
        state_dict: Names and tensors.
        prefix: Prefix of the module's own names in ``state_dict``.

    Raises:
        CheckpointError: If the state dict holds factors that fit no layer.
    """
    if isinstance(state_dict, MutableMapping):
        state_dict.pop(NOTE, None)
    make_dense(module, lambda name: f"{prefix}{name}.weight" in state_dict)
    fused = ("in_proj_weight", "q_proj_weight")
    close_attention(module, lambda name: any(f"{prefix}{name}.{key}" in state_dict for key in fused))
    rebuild_from_state_dict(module, state_dict, prefix)


def factorized_names(module: nn.Module) -> set[str]:
    """Names of the factorized layers."""
    return {name for name, layer in walk(module) if isinstance(layer, FactorizedLayer)}
