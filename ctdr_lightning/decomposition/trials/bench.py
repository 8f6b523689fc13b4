"""The bench: choices of one dense model at any share, tried out on it and taken off again.

A trial puts the factors in, refits them and measures how far the outputs then are from the dense ones.

The trial that is taken is refined in the end (`refine`): that is too slow for each that is looked at.

Which way of judging errors is best differs from network to network and from share to share (of {weights, Fisher} x
{plain, covariance} each is best somewhere), so a few are tried and the least measured divergence wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ctdr_lightning.basics.interrupts import interrupts_held, put_back_after
from ctdr_lightning.basics.parallel import each
from ctdr_lightning.decomposition.choose.batches import N_BATCHES, Batches, Step, untouched
from ctdr_lightning.decomposition.choose.by_share import ModelOptions, Start
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.choose.costs import CostModel, factor_costs
from ctdr_lightning.decomposition.choose.divergence import Judge
from ctdr_lightning.decomposition.choose.request import MethodLike, Request
from ctdr_lightning.decomposition.choose.select import Layer, find_layers, on_processor
from ctdr_lightning.decomposition.choose.sensitivity import Evidence, gather
from ctdr_lightning.decomposition.choose.spectra import look_untrained
from ctdr_lightning.decomposition.layers.attention import opened
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import factorize, replace_everywhere
from ctdr_lightning.decomposition.layers.tied import follow_owners
from ctdr_lightning.decomposition.methods import METHODS
from ctdr_lightning.decomposition.trials.refine import Answers, Best, factors_of, refine, rounds_worth
from ctdr_lightning.decomposition.trials.refit import DenseRecord, Statistics, refit, set_statistics

# Least squares minds every logit alike and sees few rows: CREPE's 360 sigmoids at x16, 96 frames, had 7.8 nats with it
# and 2.5 without. Of about 40 trials on C, R, U and X that ended below this one, at 0.0011 nats, was an eighth nearer
# without it; the others were nearer with it, up to fourteen times.
_TRUSTED_NATS = 0.5


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
    """Chooses ranks of one dense model, and measures how far the outputs then are from the dense ones.

    The model stays dense until `adopt`. Made by `bench_of`.

    Args:
        model: Dense.
        layers: Its layers.
        request: Methods, cost model and progress bars that were asked for.
        batches: Without them errors are those of the weights, and factors are neither refitted nor measured.
        solver: Registered solver name.
        flops: Operations that a refinement may take; None for `refine`'s own allowance.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        request: Request,
        batches: Batches | None = None,
        solver: str = "gram",
        flops: float | None = None,
    ) -> None:
        self.model, self.layers = model, layers
        self._request, self._batches, self._solver, self._flops = request, batches, solver, flops

    @cached_property
    def _evidence(self) -> Evidence | None:
        """Gathered when ranks are first asked for: where the dense model fits nobody asks."""
        return gather(self.model, self.layers, self._batches) if self._batches is not None else None

    @cached_property
    def noted(self) -> dict[str, Layer]:
        """The layers by name, with the available evidence."""
        layers = self._evidence.noted(self.layers) if self._evidence is not None else self.layers
        return {layer.name: layer for layer in layers}

    @cached_property
    def _options(self) -> ModelOptions:
        return ModelOptions(list(self.noted.values()), self._request, self._evidence)

    @cached_property
    def _dense(self) -> tuple[Judge, DenseRecord] | None:
        """The dense model's outputs on the batches: to compare with, and to refit to."""
        if self._batches is None:
            return None
        return Judge(self.model, self._batches), DenseRecord(self.model, list(self.noted.values()), self._batches)

    @property
    def judging(self) -> Sequence[Any]:
        """The batches that candidates are compared on, which nothing is fitted to where there are others."""
        return self._batches.judging if self._batches is not None else ()

    @cached_property
    def spread(self) -> float:
        """Mean divergence of the dense outputs from their own mean, in nats; infinite without batches."""
        return self._dense[0].spread() if self._dense is not None else math.inf

    @cached_property
    def looks_untrained(self) -> bool:
        """Whether the dense weights have the spectra of random numbers."""
        return look_untrained(self.model.parameters())

    @property
    def starts(self) -> tuple[Start, ...]:
        """The ways to judge errors that there is evidence for."""
        return self._options.starts

    def choices(self, share: float, resource: str = "parameters", start: Start | None = None) -> Choices:
        """Choices by one way of judging errors: milliseconds, nothing is factorized.

        Args:
            share: Share of the resource that all layers together keep, in (0, 1].
            resource: ``"parameters"``, ``"flops"``, ``"memory"`` or ``"seconds"``.
            start: The way; None takes the first of `starts`.

        Raises:
            ConfigError: If even the cheapest options cost more.
        """
        return self._options.choices(share, resource, start)

    def best(self, share: float, resource: str = "parameters") -> Trial:
        """The trial of least divergence over the ways to judge errors; arguments as for `choices`."""
        return self.trials(share, resource, self.starts)[0]

    def trials(self, share: float, resource: str, starts: Sequence[Start], enough: float = 0.0) -> list[Trial]:
        """A trial of the different choices by some ways of judging errors, by rising divergence.

        Args:
            share: As for `choices`.
            resource: As for `choices`.
            starts: The ways.
            enough: A divergence, in nats, after which no other way is tried.
        """
        found: dict[str, Trial] = {}
        for start in starts:
            choices = self.choices(share, resource, start)
            key = f"{start.covariance} {choices.to_dict()}"
            if key not in found:
                found[key] = self.trial(choices, start)
                if found[key].divergence <= enough:
                    break
        return sorted(found.values(), key=lambda trial: trial.divergence)

    def trial(self, choices: Choices, start: Start | None = None) -> Trial:
        """Factorize, and where there are batches refit and measure; the model stays dense."""
        start = start or Start()
        layers = self._factorized(choices, start)
        if self._dense is None or not layers:
            return Trial(choices, start, math.nan if layers else 0.0, layers, {})
        with standing(self.model, self.noted, layers):
            found = self._fitted(layers, *self._dense)
        return Trial(choices, start, found.divergence, layers, found.statistics)

    def refined(self, trial: Trial) -> Trial:
        """The same trial with all its factors moved towards the dense outputs, as far as that wins on the batches."""
        if self._batches is None or self._dense is None or not trial.layers or trial.refined:
            return trial
        n_rounds = rounds_worth(trial.layers, self._batches, trial.divergence, self._step_flops(trial), self._flops)
        if not n_rounds:
            return replace(trial, refined=True)
        model, answers = self.model, Answers(self.model, self._batches)
        judge, record = self._dense
        before = trial.divergence, trial.statistics
        with standing(model, self.noted, trial.layers), untouched(model):
            settle = partial(_settled, model, record, _statistics_now(model, trial.statistics))
            set_statistics(model, trial.statistics)
            progress = self._request.progress
            found = refine(model, trial.layers, answers, judge, settle, before, n_rounds, progress)
        return replace(trial, divergence=found[0], statistics=found[1], refined=True)

    @torch.no_grad()
    def adopt(self, trial: Trial) -> None:
        """Make a trial's layers the model's, with the dense layers' own bias parameters; nothing is tried after it."""
        swaps: dict[nn.Module, nn.Module] = {}
        for layer in self.layers:
            if layer.name not in trial.layers:
                continue
            new, bias = trial.layers[layer.name], getattr(layer.module, "bias", None)
            if bias is not None and new.bias is not None:
                bias.copy_(new.bias)
                new.chain[-1].bias = bias
            swaps[layer.module] = new
        replace_everywhere(self.model, swaps | follow_owners(self.model, swaps))
        set_statistics(self.model, trial.statistics)

    def _fitted(self, layers: Mapping[str, FactorizedLayer], judge: Judge, record: DenseRecord) -> Best:
        """Refit the layers in the model, or leave their factors if the outputs are far, and closer without it."""

        def measured(fitted: Mapping[str, FactorizedLayer]) -> tuple[Statistics, float]:
            statistics = refit(self.model, fitted, record)
            with untouched(self.model):
                set_statistics(self.model, statistics)
                return statistics, judge.divergence(self.model)

        raw = [factor.detach().clone() for factor in factors_of(layers)]
        statistics, divergence = measured(layers)
        found = Best(divergence, statistics, factors_of(layers))
        if divergence > _TRUSTED_NATS:
            found.take(raw)
            found.offer(*measured({}))
            found.put_back()
        return found

    def _step_flops(self, trial: Trial) -> float:
        """Operations of a forward and backward of the factorized network, of its layers alone."""
        forward = 0
        for name, layer in self.noted.items():
            if layer.geometry is not None:
                new = trial.layers.get(name)
                candidate = METHODS[new.method].at(layer.geometry, new.ranks) if new is not None else None
                forward += sum(
                    s.flops for call in layer.calls or () for s in factor_costs(layer.geometry, candidate, call)
                )
        return 3.0 * forward

    def _factorized(self, choices: Choices, start: Start) -> dict[str, FactorizedLayer]:
        chosen = choices.factorized
        names = [name for name in self.noted if name in chosen]
        layers = [self.noted[name] for name in names]

        def one(layer: Layer) -> FactorizedLayer:
            assert layer.geometry is not None
            choice = chosen[layer.name]
            assert choice.method is not None
            whitening = layer.whitening if start.covariance else None
            new = factorize(layer.module, layer.geometry, choice.method, choice.ranks, self._solver, whitening)
            own_bias(new)
            return new

        found = each(one, layers, "factorize", progress=self._request.progress, parallel=on_processor(layers))
        return dict(zip(names, found, strict=True))


def _settled(model: nn.Module, record: DenseRecord, dense: Statistics) -> Statistics:
    """Give BatchNorm layers the statistics of the present network; ``dense`` are those of the dense one."""
    set_statistics(model, dense)
    found = refit(model, {}, record) if dense else {}
    set_statistics(model, found)
    return found


def _statistics_now(model: nn.Module, like: Statistics) -> Statistics:
    norms: list[tuple[str, Any]] = [(name, model.get_submodule(name)) for name in like]
    return {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in norms}


def own_bias(layer: FactorizedLayer) -> None:
    """Give a factorized layer a copy of the dense layer's bias, so that a refit leaves the dense layer alone."""
    if layer.bias is not None:
        layer.chain[-1].bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=layer.bias.requires_grad)


@contextmanager
def standing(
    model: nn.Module, layers: Mapping[str, Layer], factorized: Mapping[str, FactorizedLayer]
) -> Iterator[None]:
    """Put factorized layers into a model for the duration of the block."""
    swaps: dict[nn.Module, nn.Module] = {layers[name].module: new for name, new in factorized.items()}
    swaps |= follow_owners(model, swaps)
    with put_back_after(lambda: replace_everywhere(model, {new: old for old, new in swaps.items()})):
        with interrupts_held():
            replace_everywhere(model, swaps)
        yield


@contextmanager
def bench_of(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    step: Step | None = None,
    *,
    select: str | Sequence[str] | None = None,
    method: MethodLike = "auto",
    costs: CostModel | None = None,
    multiple: int = 1,
    n_batches: int = N_BATCHES,
    flops: float | None = None,
    progress: bool = True,
) -> Iterator[Bench]:
    """A bench for a model, its attention opened meanwhile so that the projections can be chosen.

    Args:
        model: Any module, dense.
        data: Batches, as for `decompose`.
        step: Runs the model on a batch, as for `decompose`.
        select: Patterns of layers.
        method: As for `decompose`.
        costs: Cost model of memory and time.
        multiple: Ranks are rounded to multiples of it.
        n_batches: How many batches are used.
        flops: Operations that a refinement may take; None for its usual allowance.
        progress: Whether to show progress bars.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        >>> with bench_of(model, [torch.randn(64, 32) for _ in range(4)], progress=False) as bench:
        ...     trials = [bench.best(share) for share in (0.75, 0.5)]
        ...     bench.adopt(trials[0])
        >>> trials[0].divergence < trials[1].divergence
        True
    """
    with opened(model):
        layers = find_layers(model, select)
        names, costs = [layer.name for layer in layers], costs or CostModel(gates=False)
        request = Request.read(names, 0.5, method, "parameters", multiple, costs, progress)
        batches = Batches.draw(data, n_batches, step) if data is not None else None
        yield Bench(model, layers, request, batches, flops=flops)
