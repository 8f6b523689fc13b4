"""Put factorized layers in, and dense ones back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ctdr_lightning.decomposition.algorithms.linalg import working
from ctdr_lightning.decomposition.algorithms.solvers import SOLVERS
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer, factorized
from ctdr_lightning.decomposition.methods import METHODS, Ranks
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import weight_of


def walk(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module once, depth first, with its first dotted name; factorized layers are not entered."""
    seen: set[int] = set()
    stack = [(prefix, model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        if not isinstance(module, FactorizedLayer):
            children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
            stack.extend(reversed(children))


def weigh_inputs(weight: Tensor, whitening: Tensor) -> Tensor:
    """Multiply a canonical weight (groups, out, in, *kernel) by a matrix (groups, in, in) on its input channels."""
    return torch.einsum("goi...,gij->goj...", weight, whitening.to(weight))


def factorize(
    dense: nn.Module,
    geometry: Geometry,
    method: str,
    ranks: Ranks,
    solver: str = "gram",
    whitening: Tensor | None = None,
) -> FactorizedLayer:
    """The factorized form of a dense layer, its factors computed from the layer's weight.

    Args:
        dense: A layer of a registered kind.
        geometry: Its geometry.
        method: Registered method name.
        ranks: Ranks, input side first.
        solver: Registered solver name.
        whitening: Cholesky factor (groups, in, in) of the inputs' second moments; the factors then lose least of the
            outputs (Kalle et al., arXiv 2511.04494, with one moment for all taps).
    """
    layer = factorized(dense, geometry, method, ranks)
    if not weight_of(dense).is_meta:
        weight = geometry.canonical(weight_of(dense).detach())
        if whitening is None or not METHODS[method].chained:
            factors = METHODS[method].factorize(geometry, weight, layer.ranks, SOLVERS[solver])
        else:
            scaled = weigh_inputs(working(weight), whitening)
            factors = METHODS[method].factorize(geometry, scaled, layer.ranks, SOLVERS[solver])
            factors = unweigh(factors, whitening)
        layer.load_factors(factors)
    return layer


def unweigh(factors: Sequence[Tensor], whitening: Tensor) -> list[Tensor]:
    """Take the inputs' weighting out of the first factor, then fix the gauge: its rows orthonormal, the rest moved on.

    Without the gauge the factors span many orders of magnitude and the first epoch of training destroys them.
    """
    first, second, *rest = (working(factor) for factor in factors)
    columns = first.movedim(2, -1)
    shape = columns.shape
    solved = torch.linalg.solve_triangular(whitening.to(first).mT, columns.flatten(1, -2).mT, upper=True).mT
    first = solved.reshape(shape).movedim(-1, 2)
    if second.shape[0] != first.shape[0]:  # a depthwise factor takes no rotation, only scales
        norms = first.flatten(2).norm(dim=2).flatten()
        scale = norms.clamp_min(1e-30).reshape(first.shape[0], -1, *(1,) * (first.ndim - 2))
        return [first / scale, second * norms.reshape(-1, *(1,) * (second.ndim - 1)), *rest]
    basis, mix = torch.linalg.qr(first.flatten(2).mT)
    return [basis.mT.reshape(first.shape), weigh_inputs(second, mix.mT), *rest]


def replace_everywhere(model: nn.Module, swaps: dict[nn.Module, nn.Module]) -> None:
    """Put each new module in every place of its old one, shared uses included."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):  # named_children() hides the second occurrence of a child
            if child in swaps:
                setattr(parent, key, swaps[child])
