"""Ranks for all layers together at any share: tables once, then a choice in milliseconds.

Costs are known before the budget is spent: options that need more memory than the dense
layer are left out, and dense is an option at its full price. An option that turns out slower by the clock is struck out
with all larger ones of its method, and the same budget is spent over the rest; no layer is ever left dense as a
whole because one of its options did not pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.parallel import each
from ctdr_lightning.decomposition.choose.allocate import RESOURCES, LayerOptions, layer_candidates, layer_options, spend
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.choose.costs import NOT_CALLED, check_faster
from ctdr_lightning.decomposition.choose.request import Request, rank_for
from ctdr_lightning.decomposition.choose.select import Layer, on_processor
from ctdr_lightning.decomposition.choose.sensitivity import Evidence
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.methods import METHODS, Candidate, KeepDenseError

ELSEWHERE = "other layers need their parameters more"
_NONE_SMALLER = "no factorization of it is smaller"
_OR_RECOMPUTE = ", or let activations inside layers be recomputed: recompute=True."
_SHOWN = 3
_NONE_SAVES = "no factorization of it saves memory at its input size"


@dataclass(frozen=True)
class Start:
    """One way to judge a layer's error before anything is measured.

    Args:
        fisher: Whether it is weighed by the layer's sensitivity.
        covariance: Whether it is the error of the outputs, and the factors lose least of these.
    """

    fisher: bool = False
    covariance: bool = False

    def __str__(self) -> str:
        return f"{'Fisher' if self.fisher else 'weights'}{' + covariance' if self.covariance else ''}"


class ModelOptions:
    """The options of every layer of one model, and the choice among them for a share.

    Args:
        layers: The model's layers.
        request: Methods, patterns and cost model.
        evidence: Evidence of the batches, if there were any.
    """

    def __init__(self, layers: Sequence[Layer], request: Request, evidence: Evidence | None = None) -> None:
        self._request, self._evidence = request, evidence
        self._names = [layer.name for layer in layers]
        self._refused: dict[str, str] = {}
        self._open: list[Layer] = []
        self._done = [layer for layer in layers if isinstance(layer.module, FactorizedLayer)]
        self._tables: dict[bool, dict[str, list[Candidate]]] = {}
        self._prices: dict[tuple[str, bool], dict[str, LayerOptions]] = {}
        for layer in layers:
            try:
                rank_for(layer, request)
                if request.costs.gates and layer.calls == ():
                    raise KeepDenseError(NOT_CALLED)
                self._open.append(layer)
            except KeepDenseError as reason:
                self._refused[layer.name] = str(reason)

    @property
    def starts(self) -> tuple[Start, ...]:
        """The ways to judge errors that there is evidence for."""
        if self._evidence is None:
            return (Start(),)
        fisher = (False, True) if self._evidence.fisher else (False,)
        covariance = (False, True) if self._evidence.whitening else (False,)
        return tuple(Start(f, c) for f in fisher for c in covariance)

    def choices(self, share: float, resource: str = "parameters", start: Start | None = None) -> Choices:
        """Spend one share of a resource over all layers where it hurts least.

        Args:
            share: In (0, 1]: of the resource that all dense layers take together.
            resource: Key of ``RESOURCES``.
            start: Weighting of errors; None takes the first of `starts`.

        Raises:
            ConfigError: If even the cheapest options cost more.
        """
        start = start or self.starts[0]
        found = {name: LayerChoice(reason=reason) for name, reason in self._refused.items()}
        if self._open:
            found |= self._spent(share, resource, start)
        return Choices({name: found[name] for name in self._names})

    def _spent(self, share: float, resource: str, start: Start) -> dict[str, LayerChoice]:
        options = self._options(resource, start)
        if all(len(own.candidates) == 1 for own in options.values()):
            tables = self._candidates(start.covariance)
            return {name: LayerChoice(reason=_NONE_SAVES if tables[name] else _NONE_SMALLER) for name in options}
        full, spent = self._spent_already(resource)
        budget = share * (full + sum(float(o.cost[0]) for o in options.values())) - spent
        layers = {layer.name: layer for layer in self._open}
        while True:
            try:
                picked = spend(options, budget)
            except KeepDenseError as reason:
                if self._done:
                    return {name: LayerChoice(reason="an earlier call spent the share") for name in options}
                raise ConfigError(
                    f"rank={share} of all {resource} cannot be met: {reason}.{_costliest(options)}{_held(options)}",
                    "Raise rank" + ("." if self._request.costs.recompute else _OR_RECOMPUTE),
                ) from None
            slow = self._slow(layers, picked)
            if not slow:
                return {name: _choice(candidate) for name, candidate in picked.items()}
            options |= {name: _without(options[name], candidate) for name, candidate in slow.items()}

    def _spent_already(self, resource: str) -> tuple[float, float]:
        """The cost of layers that an earlier call factorized, when dense and now: a second call changes nothing."""
        full = spent = 0.0
        for layer in self._done:
            module: Any = layer.module
            candidate = METHODS[module.method].at(module.geometry, module.ranks)
            full += RESOURCES[resource](layer, None, self._request.costs)
            spent += RESOURCES[resource](layer, candidate, self._request.costs)
        return full, spent

    def _slow(self, layers: Mapping[str, Layer], picked: Mapping[str, Candidate | None]) -> dict[str, Candidate]:
        costs = self._request.costs
        found = {}
        for name, candidate in picked.items():
            if candidate is None or not (costs.gates and costs.measure and layers[name].calls):
                continue
            try:
                check_faster(layers[name], candidate, costs)
            except KeepDenseError:
                found[name] = candidate
        return found

    def _options(self, resource: str, start: Start) -> dict[str, LayerOptions]:
        weights = self._evidence.fisher if start.fisher and self._evidence is not None else {}
        priced = self._priced(resource, start.covariance)
        return {name: replace(own, loss=own.loss * weights.get(name, 1.0)) for name, own in priced.items()}

    def _priced(self, resource: str, covariance: bool) -> dict[str, LayerOptions]:
        """The options of all layers at their costs, their losses not weighed: the same for every share."""
        key, tables = (resource, covariance), self._candidates(covariance)
        if key not in self._prices:
            costs = self._request.costs
            self._prices[key] = {
                layer.name: layer_options(layer, tables[layer.name], resource, costs) for layer in self._open
            }
        return self._prices[key]

    def _candidates(self, covariance: bool) -> dict[str, list[Candidate]]:
        if covariance not in self._tables:
            layers = [layer if covariance else replace(layer, whitening=None) for layer in self._open]
            request = self._request
            found = each(
                lambda layer: layer_candidates(layer, request.methods_for(layer), request.multiple),
                layers,
                "try ranks",
                progress=request.progress,
                parallel=on_processor(layers),
            )
            self._tables[covariance] = {layer.name: own for layer, own in zip(layers, found, strict=True)}
        return self._tables[covariance]


def _choice(candidate: Candidate | None) -> LayerChoice:
    return LayerChoice.of(candidate) if candidate else LayerChoice(reason=ELSEWHERE)


def _without(options: LayerOptions, slow: Candidate) -> LayerOptions:
    """The options less the one that is slow and all of its method that have as many parameters or more."""
    kept = [
        row
        for row, c in enumerate(options.candidates)
        if c is None or c.method is not slow.method or c.parameters < slow.parameters
    ]
    return LayerOptions([options.candidates[row] for row in kept], options.cost[kept], options.loss[kept])


def _costliest(options: Mapping[str, LayerOptions]) -> str:
    least = {name: float(own.cost.min()) for name, own in options.items()}
    most = sorted(least, key=lambda name: -least[name])[:_SHOWN]
    return f" Most of it takes {', '.join(f'{name!r} ({least[name]:.4g})' for name in most)}."


def _held(options: Mapping[str, LayerOptions]) -> str:
    stuck = [name for name, own in options.items() if len(own.candidates) == 1]
    if not stuck:
        return ""
    return f" {len(stuck)} layers stay dense, {min(stuck)!r} among them: no factorization of it pays at its input size."
