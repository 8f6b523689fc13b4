"""Try choices on a model: put the factors in, refit them, measure the outputs' divergence, take everything back.

The trial that is taken is refined in the end (`refine`): that is too slow for each that is looked at.

Which way of judging errors is best differs from network to network and from share to share (of {weights, Fisher} x
{plain, covariance} each is best somewhere), so a few are tried and the least measured divergence wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ctdr_lightning.basics.interrupts import interrupts_held, put_back_after
from ctdr_lightning.basics.parallel import each
from ctdr_lightning.decomposition.choose.batches import untouched
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.choose.costs import factor_costs
from ctdr_lightning.decomposition.choose.divergence import Judge
from ctdr_lightning.decomposition.choose.rank_search import RankSearch, Start
from ctdr_lightning.decomposition.choose.select import Layer, on_processor
from ctdr_lightning.decomposition.choose.sensitivity import Evidence
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import factorize, replace_everywhere
from ctdr_lightning.decomposition.layers.tied import follow_owners
from ctdr_lightning.decomposition.methods import METHODS
from ctdr_lightning.decomposition.refine import Answers, Best, factors_of, refine, rounds_worth
from ctdr_lightning.decomposition.refit import DenseRecord, Statistics, refit, set_statistics


@dataclass(frozen=True)
class Trial:
    """Choices with the factors that carry them out, and how far the outputs then are from the dense model's.

    Args:
        choices: Of every layer.
        start: How the layers' errors were judged.
        divergence: Mean divergence of the outputs, in nats; see `choose.divergence`. NaN where nothing was run.
        layers: The factorized layers by name, their last factors refitted.
        statistics: Running mean and variance that BatchNorm layers should have, by name.
        refined: Whether all factors were moved towards the dense outputs.
    """

    choices: Choices
    start: Start
    divergence: float
    layers: Mapping[str, FactorizedLayer] = field(repr=False)
    statistics: Statistics = field(repr=False)
    refined: bool = False


class Bench:
    """Where choices are tried on one dense model, which stays as it is.

    Args:
        model: Dense.
        layers: Its layers, with what evidence there is.
        evidence: Its batches are run; without it factors are neither refitted nor measured.
        solver: Registered solver name.
        progress: Whether to show a progress bar.
        flops: Operations that a refinement may take; None for `refine`'s own allowance.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        evidence: Evidence | None,
        solver: str = "gram",
        progress: bool = True,
        flops: float | None = None,
    ) -> None:
        self._model, self._layers = model, {layer.name: layer for layer in layers}
        self._solver, self._progress = solver, progress
        self._flops = flops
        self._batches = evidence.batches if evidence is not None else None
        self._judge = Judge(model, evidence.batches) if evidence is not None else None
        self._record = DenseRecord(model, layers, evidence.batches) if evidence is not None else None

    def best(self, search: RankSearch, share: float, resource: str = "parameters") -> Trial:
        """The trial of least divergence over the ways to judge errors; arguments as for `trials`."""
        return self.trials(search, share, resource, search.starts)[0]

    def trials(self, search: RankSearch, share: float, resource: str, starts: Sequence[Start]) -> list[Trial]:
        """A trial of each different proposal, by rising divergence.

        Args:
            search: Makes the choices.
            share: Share of the resource that all layers together keep.
            resource: Key of ``RESOURCES``.
            starts: The ways to judge errors that are tried.
        """
        found: dict[str, Trial] = {}
        for start in starts:
            choices = search.choices(share, resource, start)
            key = f"{start.covariance} {choices.to_dict()}"
            if key not in found:
                found[key] = self.trial(choices, start)
        return sorted(found.values(), key=lambda trial: trial.divergence)

    def trial(self, choices: Choices, start: Start) -> Trial:
        """Factorize, and where there are batches refit and measure."""
        layers = self._factorized(choices, start)
        if self._judge is None or self._record is None or not layers:
            return Trial(choices, start, math.nan if layers else 0.0, layers, {})
        with standing(self._model, self._layers, layers):
            found = self._fitted(layers)
        return Trial(choices, start, found.divergence, layers, found.statistics)

    def refined(self, trial: Trial) -> Trial:
        """The same trial with all its factors moved towards the dense outputs, as far as that wins on the batches."""
        if self._batches is None or self._judge is None or not trial.layers or trial.refined:
            return trial
        n_rounds = rounds_worth(trial.layers, self._batches, trial.divergence, self._step_flops(trial), self._flops)
        if not n_rounds:
            return replace(trial, refined=True)
        model, answers = self._model, Answers(self._model, self._batches)
        before = trial.divergence, trial.statistics
        with standing(model, self._layers, trial.layers), untouched(model):
            settle = partial(self._settled, _statistics_now(model, trial.statistics))
            set_statistics(model, trial.statistics)
            found = refine(model, trial.layers, answers, self._judge, settle, before, n_rounds, self._progress)
        return replace(trial, divergence=found[0], statistics=found[1], refined=True)

    def _fitted(self, layers: Mapping[str, FactorizedLayer]) -> Best:
        """Refit layers that stand in the model, or leave their factors where the outputs are nearer without it."""
        # Least squares minds every logit alike and sees few rows: CREPE's 360 sigmoids at x16, 96 frames, had
        # 7.8 nats with it and 2.5 without. On five small networks 19 of 20 trials had less with it, up to a third.
        statistics, divergence = self._measured({})
        found = Best(divergence, statistics, factors_of(layers))
        found.offer(*self._measured(layers))
        found.put_back()
        return found

    def _measured(self, fitted: Mapping[str, FactorizedLayer]) -> tuple[Statistics, float]:
        """Refit some layers; the statistics that BatchNorm then should have, and the divergence with these."""
        assert self._record is not None
        assert self._judge is not None
        statistics = refit(self._model, fitted, self._record)
        with untouched(self._model):
            set_statistics(self._model, statistics)
            return statistics, self._judge.divergence(self._model)

    def _settled(self, dense: Statistics) -> Statistics:
        """Give BatchNorm layers what the network as it stands should have; ``dense`` is what the dense one had."""
        assert self._record is not None
        set_statistics(self._model, dense)
        found = refit(self._model, {}, self._record) if dense else {}
        set_statistics(self._model, found)
        return found

    def _step_flops(self, trial: Trial) -> float:
        """Operations of a forward and backward of the factorized network, of its layers alone."""
        forward = 0
        for name, layer in self._layers.items():
            if layer.geometry is not None:
                new = trial.layers.get(name)
                candidate = METHODS[new.method].at(layer.geometry, new.ranks) if new is not None else None
                forward += sum(
                    s.flops for call in layer.calls or () for s in factor_costs(layer.geometry, candidate, call)
                )
        return 3.0 * forward

    def _factorized(self, choices: Choices, start: Start) -> dict[str, FactorizedLayer]:
        chosen = choices.factorized
        names = [name for name in self._layers if name in chosen]
        layers = [self._layers[name] for name in names]

        def one(layer: Layer) -> FactorizedLayer:
            assert layer.geometry is not None
            choice = chosen[layer.name]
            assert choice.method is not None
            whitening = layer.whitening if start.covariance else None
            new = factorize(layer.module, layer.geometry, choice.method, choice.ranks, self._solver, whitening)
            own_bias(new)
            return new

        found = each(one, layers, "factorize", progress=self._progress, parallel=on_processor(layers))
        return dict(zip(names, found, strict=True))


def _statistics_now(model: nn.Module, like: Statistics) -> Statistics:
    norms: list[tuple[str, Any]] = [(name, model.get_submodule(name)) for name in like]
    return {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in norms}


def own_bias(layer: FactorizedLayer) -> None:
    """Give a factorized layer a copy of the dense layer's bias, so that a refit leaves the dense layer alone."""
    if layer.bias is not None:
        layer.chain[-1].bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=layer.bias.requires_grad)


@torch.no_grad()
def adopt(model: nn.Module, layers: Sequence[Layer], trial: Trial) -> None:
    """Make a trial's layers the model's, with the dense layers' own bias parameters."""
    swaps: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        if layer.name not in trial.layers:
            continue
        new, bias = trial.layers[layer.name], getattr(layer.module, "bias", None)
        if bias is not None and new.bias is not None:
            bias.copy_(new.bias)
            new.chain[-1].bias = bias
        swaps[layer.module] = new
    replace_everywhere(model, swaps | follow_owners(model, swaps))
    set_statistics(model, trial.statistics)


@contextmanager
def standing(
    model: nn.Module, layers: Mapping[str, Layer], factorized: Mapping[str, FactorizedLayer]
) -> Iterator[None]:
    """Have factorized layers stand in a model for a while."""
    swaps: dict[nn.Module, nn.Module] = {layers[name].module: new for name, new in factorized.items()}
    swaps |= follow_owners(model, swaps)
    with put_back_after(lambda: replace_everywhere(model, {new: old for old, new in swaps.items()})):
        with interrupts_held():
            replace_everywhere(model, swaps)
        yield
