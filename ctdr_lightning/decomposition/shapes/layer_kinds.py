"""Which modules can be decomposed, and how to read their geometry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.decomposition.shapes.geometry import CONVOLUTIONS, Geometry


@dataclass(frozen=True)
class Kind:
    """A family of dense layers.

    Args:
        matches: Whether a module belongs to the family and computes the same as the family's own forward.
        geometry: Reads the module's hyperparameters.
    """

    matches: Callable[[nn.Module], bool]
    geometry: Callable[[nn.Module], Geometry]


KINDS: Registry[Kind] = Registry("layer kind", group="ctdr_lightning.kinds")


def kind_of(module: nn.Module) -> str | None:
    """Name of the registered kind a module belongs to, or None."""
    return next((name for name in KINDS if KINDS[name].matches(module)), None)


def weight_of(module: nn.Module) -> nn.Parameter:
    """The module's ``weight``, typed (torch types every attribute of a module as tensor or module)."""
    return cast(nn.Parameter, module.weight)


def is_channels_last(weight: Tensor) -> bool:
    """Whether a weight is stored channels last, and could be stored otherwise."""
    return weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def _computes_like(base: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, base) and type(module).forward is base.forward


def _is_hf_conv1d(module: nn.Module) -> bool:
    found = type(module)
    return found.__name__ == "Conv1D" and found.__module__.startswith("transformers.")


def _linear(module: Any) -> Geometry:
    return Geometry(module.in_features, module.out_features)


def _hf_conv1d(module: nn.Module) -> Geometry:
    n_in, n_out = weight_of(module).shape
    return Geometry(n_in, n_out, flipped=True)


def _embedding(module: Any) -> Geometry:
    sizes = (module.num_embeddings, module.embedding_dim)
    return Geometry(*sizes, flipped=True, lookup=True, padding_idx=module.padding_idx, sparse=module.sparse)


def _convolution(module: Any) -> Geometry:
    padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
    return Geometry(
        in_size=module.in_channels,
        out_size=module.out_channels,
        kernel=tuple(module.kernel_size),
        stride=tuple(module.stride),
        padding=padding,
        dilation=tuple(module.dilation),
        output_padding=tuple(module.output_padding),
        groups=module.groups,
        padding_mode=module.padding_mode,
        transposed=module.transposed,
    )


KINDS.register("linear")(Kind(_computes_like(nn.Linear), _linear))
KINDS.register("hf_conv1d")(Kind(_is_hf_conv1d, _hf_conv1d))
KINDS.register("embedding")(Kind(_computes_like(nn.Embedding), _embedding))
for (_n_axes, _transposed), _base in CONVOLUTIONS.items():
    _name = f"conv_transpose{_n_axes}d" if _transposed else f"conv{_n_axes}d"
    KINDS.register(_name)(Kind(_computes_like(_base), _convolution))
