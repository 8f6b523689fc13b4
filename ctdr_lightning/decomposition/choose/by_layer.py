"""Ranks chosen layer by layer: the best candidate of each that pays, or dense and the reason."""

from __future__ import annotations

from collections.abc import Sequence

from ctdr_lightning.basics.parallel import each
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.choose.costs import CostModel, check_pays
from ctdr_lightning.decomposition.choose.rank import explicit, ranked
from ctdr_lightning.decomposition.choose.request import Request, check_reachable, rank_for
from ctdr_lightning.decomposition.choose.select import Layer, on_processor
from ctdr_lightning.decomposition.methods import Candidate, KeepDenseError


def choose_by_layer(layers: Sequence[Layer], request: Request) -> Choices:
    """Decide every layer by itself: method and ranks, or dense and why.

    Raises:
        ConfigError: For patterns that conflict, ranks a layer does not have, a budget that cannot be met, and weights
            that are not finite.
    """
    check_reachable(layers, request)
    found = each(
        lambda layer: _choice_for(layer, request),
        layers,
        "try ranks",
        progress=request.progress,
        parallel=on_processor(layers),
    )
    return Choices({layer.name: choice for layer, choice in zip(layers, found, strict=True)})


def _choice_for(layer: Layer, request: Request) -> LayerChoice:
    """The best candidate that pays."""
    try:
        candidates = _candidates_for(layer, request)
    except KeepDenseError as reason:
        return LayerChoice(reason=str(reason))
    return _best_paying(layer, candidates, request)


def _candidates_for(layer: Layer, request: Request) -> list[Candidate]:
    """Candidates by the weights alone, best first.

    Raises:
        KeepDenseError: If there is none.
    """
    spec = rank_for(layer, request)
    methods = request.methods_for(layer)
    assert layer.geometry is not None
    if spec.ranks:
        return [explicit(methods[0], layer.geometry, spec.ranks, f"rank of layer {layer.name!r}")]
    return ranked(spec, methods, layer.geometry, layer.weighted, request.multiple)


def _best_paying(layer: Layer, candidates: Sequence[Candidate], request: Request) -> LayerChoice:
    reasons = []
    for candidate in candidates:
        try:
            return LayerChoice.of(_check(layer, candidate, request.costs))
        except KeepDenseError as reason:
            reasons.append(str(reason))
    return LayerChoice(reason="; ".join(reasons))


def _check(layer: Layer, candidate: Candidate, costs: CostModel) -> Candidate:
    assert layer.geometry is not None
    if candidate.parameters >= layer.geometry.n_weights:
        shown = f"{candidate.method.name} at rank {' x '.join(map(str, candidate.ranks))}"
        raise KeepDenseError(f"{shown} would have {candidate.parameters:,} weights, dense {layer.geometry.n_weights:,}")
    check_pays(layer, candidate, costs)
    return candidate
