"""The factorized layer: a chain of plain layers that still answers as the dense layer it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from ctdr_lightning.decomposition.methods import METHODS, Ranks
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import is_channels_last, weight_of

_OWN = set(vars(nn.Module()))
_HOOKS = [name for name in sorted(_OWN) if "hook" in name and "state_dict" not in name]


class Shift(nn.Module):
    """Adds a bias; the last link of a chain whose last layer cannot carry it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias (features,) to (..., features)."""
        return x if self.bias is None else x + self.bias


class FactorizedLayer(nn.Module):
    """A dense layer as a chain of smaller ones.

    The chain is the only child and is named after its method, so a state dict tells by its names and shapes alone how
    to rebuild it. Every plain attribute of the dense layer (``in_channels``, ``kernel_size`` ...) is kept, ``weight``
    is the product of the factors, ``bias`` that of the last layer: code that reads them, as ``nn.MultiheadAttention``
    does, goes on working.

    Args:
        dense: The layer to replace; its bias parameter is taken over, its weight is not read.
        geometry: The dense layer's geometry.
        method: Registered method name.
        ranks: Ranks of the method, input side first.
    """

    def __init__(self, dense: nn.Module, geometry: Geometry, method: str, ranks: Ranks) -> None:
        super().__init__()
        self.dense_class = type(dense)
        self.dense_attributes = {name: value for name, value in vars(dense).items() if name not in _OWN}
        vars(self).update(self.dense_attributes)
        vars(self).update({name: vars(dense)[name] for name in _HOOKS})
        self.geometry, self.method, self.ranks = geometry, method, tuple(ranks)
        self.factor_geometries = METHODS[method].factor_geometries(geometry, self.ranks)
        self.add_module(
            method, self._build_chain(weight_of(dense), cast("nn.Parameter | None", getattr(dense, "bias", None)))
        )
        self.train(dense.training)

    def _build_chain(self, weight: Tensor, bias: nn.Parameter | None) -> nn.Sequential:
        chain = nn.Sequential(*(factor.build(False, weight.device, weight.dtype) for factor in self.factor_geometries))
        if is_channels_last(weight):
            chain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        chain.requires_grad_(weight.requires_grad)
        if not METHODS[self.method].chained:
            chain.append(Shift())
        if bias is not None:
            chain[-1].bias = bias
        return chain

    @property
    def chain(self) -> nn.Sequential:
        """The small layers, first to last."""
        return cast(nn.Sequential, self._modules[self.method])

    @property
    def factor_layers(self) -> list[nn.Module]:
        """The layers of the chain that have a weight."""
        return list(islice(self.chain, len(self.factor_geometries)))

    def forward(self, x: Tensor) -> Tensor:
        """Run the chain; shapes as the dense layer's."""
        return self.chain(x)

    @property
    def weight(self) -> Tensor:
        """The dense weight that the factors represent, differentiable, in the dense layer's own layout."""
        pairs = zip(self.factor_geometries, self.factor_layers, strict=True)
        factors = [geometry.canonical(weight_of(layer)) for geometry, layer in pairs]
        return self.geometry.native(METHODS[self.method].compose(self.geometry, self.ranks, factors))

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, the dense layer's own parameter."""
        return getattr(self.chain[-1], "bias", None)

    @torch.no_grad()
    def load_factors(self, factors: Sequence[Tensor]) -> None:
        """Copy canonical factor weights into the chain."""
        for geometry, layer, factor in zip(self.factor_geometries, self.factor_layers, factors, strict=True):
            weight_of(layer).copy_(geometry.native(factor))

    def to_dense(self) -> nn.Module:
        """The dense layer again, of its first class, with the factors' product as its weight."""
        dense: Any = self.dense_class.__new__(self.dense_class)
        nn.Module.__init__(dense)
        vars(dense).update(self.dense_attributes)
        vars(dense).update({name: vars(self)[name] for name in _HOOKS})
        weight = self.weight.detach()
        dense.weight = nn.Parameter(self._laid_out(weight), requires_grad=weight_of(self.chain[0]).requires_grad)
        if not self.geometry.lookup:
            dense.bias = self.bias
        return dense.train(self.training)

    def _laid_out(self, weight: Tensor) -> Tensor:
        channels_last = any(is_channels_last(weight_of(factor)) for factor in self.factor_layers)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return weight.clone(memory_format=layout)

    def extra_repr(self) -> str:
        """Dense class, method and ranks."""
        return f"{self.dense_class.__name__} by {self.method}, ranks={list(self.ranks)}"


class FactorizedTransposed(FactorizedLayer):
    """A transposed convolution, which can be told its output's size at the call."""

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Run the chain; each layer receives the size of the axes it acts on."""
        if output_size is None:
            return self.chain(x)
        n_axes = self.geometry.n_axes
        for factor, layer in zip(self.factor_geometries, self.factor_layers, strict=True):
            if not factor.transposed:
                x = layer(x)
                continue
            own = [size > 1 or step > 1 for size, step in zip(factor.kernel, factor.stride, strict=True)]
            sizes = zip(own, output_size[-n_axes:], x.shape[-n_axes:], strict=True)
            x = layer(x, [wanted if acts else found for acts, wanted, found in sizes])
        return x


class FactorizedTrain(FactorizedLayer):
    """A linear layer as a tensor train: each core is a linear layer over one pair of modes."""

    def __init__(self, dense: nn.Module, geometry: Geometry, method: str, ranks: Ranks) -> None:
        super().__init__(dense, geometry, method, ranks)
        lefts = (1, *self.ranks)
        self.in_modes = [factor.in_size // left for factor, left in zip(self.factor_geometries, lefts, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        """Contract one core after another with x (..., in); returns (..., out)."""
        y = x.reshape(-1, x.shape[-1])
        for layer, size in zip(self.factor_layers, self.in_modes, strict=True):
            left = weight_of(layer).shape[1] // size
            y = layer(y.unflatten(1, (size, -1, left)).transpose(1, 2).flatten(2)).flatten(1)
        return self.chain[-1](y.reshape(*x.shape[:-1], -1))


def factorized(dense: nn.Module, geometry: Geometry, method: str, ranks: Ranks) -> FactorizedLayer:
    """An empty factorized layer of the class that the method and the layer need."""
    if not METHODS[method].chained:
        return FactorizedTrain(dense, geometry, method, ranks)
    return (FactorizedTransposed if geometry.transposed else FactorizedLayer)(dense, geometry, method, ranks)
