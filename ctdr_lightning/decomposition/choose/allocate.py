"""Spend one budget over all layers where it hurts least.

Paper: Idelbayev and Carreira-Perpinan, CVPR 2020 ("Low-rank compression of neural nets: learning the rank of each
layer"). Reproduced: one spectrum a layer, one Lagrange multiplier, exact minimum over ranks a layer. Changed: several
methods compete within a layer, errors are relative to the layer's norm (BatchNorm makes the absolute scale
meaningless), the resource may be parameters, operations, training memory or predicted seconds, and the
multiplier's remainder is spent greedily; with batches, a layer's loss is weighted by its sensitivity and its
error is that of its outputs. Complexity: one rank table a layer and method, then O(rows) a bisection
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.decomposition.algorithms.linalg import working
from ctdr_lightning.decomposition.choose.costs import CostModel, factor_costs, predicted_seconds, weigh
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.methods import Candidate, KeepDenseError, Method, RankTable

_ROWS = 64
_BISECTIONS = 80

Resource = Callable[[Layer, Candidate | None, CostModel], float]
RESOURCES: Registry[Resource] = Registry("resource", group="ctdr_lightning.resources")


@RESOURCES.register("parameters")
def parameters(layer: Layer, candidate: Candidate | None, costs: CostModel) -> float:
    """Weights, bias aside."""
    assert layer.geometry is not None
    return float(candidate.parameters if candidate else layer.geometry.n_weights)


@RESOURCES.register("flops")
def flops(layer: Layer, candidate: Candidate | None, costs: CostModel) -> float:
    """Operations of a forward at the layer's input shapes."""
    assert layer.geometry is not None
    return float(sum(s.flops for shape in layer.calls or () for s in factor_costs(layer.geometry, candidate, shape)))


@RESOURCES.register("memory")
def memory(layer: Layer, candidate: Candidate | None, costs: CostModel) -> float:
    """Bytes of weights, gradients and optimizer state, and of the activations that factors add."""
    assert layer.geometry is not None
    dense = costs.state_bytes(layer, layer.geometry.n_weights)
    return float(dense + (weigh(layer, candidate, costs).net_bytes if candidate else 0))


@RESOURCES.register("seconds")
def seconds(layer: Layer, candidate: Candidate | None, costs: CostModel) -> float:
    """Predicted forward and backward on the layer's device."""
    return predicted_seconds(layer, candidate)


@dataclass(frozen=True)
class LayerOptions:
    """Options of one layer.

    Args:
        candidates: Factorizations; None is the dense layer.
        cost: Shape (n,), in units of the resource.
        loss: Shape (n,), minus the logarithm of the energy kept: kept shares multiply along a chain of layers, so
            no layer is cut to nothing for the sake of the others.
    """

    candidates: list[Candidate | None]
    cost: Tensor
    loss: Tensor


def frontier(table: RankTable, most: int = _ROWS) -> RankTable:
    """The rows that no other row beats in both parameters and error, thinned evenly."""
    order = table.parameters.argsort(stable=True)
    table = table.where(order)
    best = table.error.cummin(0).values
    first = torch.cat((torch.ones(1, dtype=torch.bool), best[1:] < best[:-1]))
    table = table.where(first)
    kept = torch.linspace(0, len(table.error) - 1, min(most, len(table.error))).round().long().unique()
    return table.where(kept)


def layer_candidates(layer: Layer, methods: Sequence[Method], multiple: int) -> list[Candidate]:
    """Every worthwhile factorization of a layer: the expensive part, the same for every share and resource."""
    assert layer.geometry is not None
    found: list[Candidate] = []
    for method in methods:
        weight = layer.weighted if method.chained else working(layer.weight)
        table = frontier(method.table(layer.geometry, weight).rounded(multiple))
        rows = (table.candidate(method, torch.tensor(row)) for row in range(len(table.error)))
        found += [row for row in rows if row.parameters < layer.geometry.n_weights]
    return found


def layer_options(layer: Layer, candidates: Sequence[Candidate], resource: str, costs: CostModel) -> LayerOptions:
    """Price a layer's options: itself at its full price, and each factorization that saves memory.

    Args:
        layer: The layer.
        candidates: Its factorizations.
        resource: Key of ``RESOURCES``.
        costs: Where it gates, factorizations that need more memory than the dense layer are no options.
    """
    saving = [c for c in candidates if not costs.gates or not layer.calls or weigh(layer, c, costs).net_bytes <= 0]
    found: list[Candidate | None] = [None, *saving]
    measure = RESOURCES[resource]
    cost = torch.tensor([measure(layer, candidate, costs) for candidate in found], dtype=torch.float64)
    lost = torch.tensor([candidate.error**2 if candidate else 0.0 for candidate in found], dtype=torch.float64)
    return LayerOptions(found, cost, -torch.log1p(-lost.clamp_max(1 - 1e-9)))


def spend(options: Mapping[str, LayerOptions], budget: float) -> dict[str, Candidate | None]:
    """Choose one option a layer: least total loss at a total cost within the budget.

    Raises:
        KeepDenseError: If even the cheapest options cost more.
    """
    cheapest = sum(float(o.cost.min()) for o in options.values())
    if cheapest > budget:
        raise KeepDenseError(f"the cheapest ranks cost {cheapest:.4g}, the budget is {budget:.4g}")
    low, high = -60.0, 60.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _total(options, _pick(options, middle)) <= budget else (middle, high)
    rows = _pick(options, high)
    if _total(options, rows) > budget:
        rows = {name: int(o.cost.argmin()) for name, o in options.items()}
    rows = _spend_rest(options, rows, budget - _total(options, rows))
    return {name: options[name].candidates[row] for name, row in rows.items()}


def _pick(options: Mapping[str, LayerOptions], log_price: float) -> dict[str, int]:
    scale = max(float(o.cost.max()) for o in options.values())
    price = math.exp(log_price) / max(scale, 1e-300)
    return {name: int((o.loss + price * o.cost).argmin()) for name, o in options.items()}


def _total(options: Mapping[str, LayerOptions], rows: Mapping[str, int]) -> float:
    return sum(float(options[name].cost[row]) for name, row in rows.items())


def _spend_rest(options: Mapping[str, LayerOptions], rows: dict[str, int], rest: float) -> dict[str, int]:
    """Upgrade the layer that gains most per unit, again and again, until nothing fits."""
    while True:
        best: tuple[float, str, int] | None = None
        for name, o in options.items():
            extra, gain = o.cost - o.cost[rows[name]], o.loss[rows[name]] - o.loss
            worth = torch.where((extra <= rest) & (gain > 0), gain / extra.clamp_min(1e-12), -torch.inf)
            row = int(worth.argmax())
            if worth[row] > 0 and (best is None or float(worth[row]) > best[0]):
                best = float(worth[row]), name, row
        if best is None:
            return rows
        _, name, row = best
        rest -= float(options[name].cost[row] - options[name].cost[rows[name]])
        rows[name] = row
