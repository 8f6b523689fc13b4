"""Ranks at many shares of one dense model: looked at once, asked as often as wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import nn

from ctdr_lightning.decomposition.choose.batches import N_BATCHES, Batches, Step
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.choose.costs import CostModel
from ctdr_lightning.decomposition.choose.propose import MethodLike, Request
from ctdr_lightning.decomposition.choose.rank_search import RankSearch, Start
from ctdr_lightning.decomposition.choose.select import Layer, find_layers
from ctdr_lightning.decomposition.choose.sensitivity import Evidence, gather
from ctdr_lightning.decomposition.layers.attention import opened
from ctdr_lightning.decomposition.trial import Bench, Trial, adopt


class RankChooser:
    """Chooses ranks of one dense model at any share, and measures how far the outputs then are from the dense ones.

    The model stays dense until `adopt`. Made by `rank_chooser`.

    Args:
        model: Dense.
        batches: Without them errors are those of the weights, and nothing is refitted or measured.
        select: Patterns of layers.
        method: As for `decompose`.
        costs: How memory and time are weighed.
        multiple: What ranks are rounded to.
        progress: Whether to show progress bars.
        flops: Operations that a refinement may take; None for its usual allowance.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches | None = None,
        select: str | Sequence[str] | None = None,
        method: MethodLike = "auto",
        costs: CostModel | None = None,
        multiple: int = 1,
        progress: bool = True,
        flops: float | None = None,
    ) -> None:
        self.model, self.layers = model, find_layers(model, select)
        self._batches, self._progress, self._flops = batches, progress, flops
        names = [layer.name for layer in self.layers]
        costs = costs or CostModel(gates=False)
        self._request = Request.read(names, 0.5, method, "parameters", multiple, costs, progress)

    @cached_property
    def _evidence(self) -> Evidence | None:
        """Gathered when ranks are first asked for: where the dense model fits nobody asks."""
        return gather(self.model, self.layers, self._batches) if self._batches is not None else None

    @cached_property
    def _noted(self) -> list[Layer]:
        return self._evidence.noted(self.layers) if self._evidence is not None else self.layers

    @cached_property
    def _search(self) -> RankSearch:
        return RankSearch(self._noted, self._request, self._evidence)

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.model, self._noted, self._evidence, progress=self._progress, flops=self._flops)

    @property
    def judging(self) -> Sequence[Any]:
        """The batches that candidates are compared on, which nothing is fitted to where there are others."""
        return self._batches.judging if self._batches is not None else ()

    @property
    def starts(self) -> tuple[Start, ...]:
        """The ways to judge errors that there is evidence for."""
        return self._search.starts

    def proposal(self, share: float, resource: str, start: Start) -> Choices:
        """Choices by one way of judging errors; arguments and error as for `proposals`."""
        return self._search.choices(share, resource, start)

    def proposals(self, share: float, resource: str = "parameters") -> list[tuple[Start, Choices]]:
        """Choices by each way of judging errors: milliseconds, nothing is factorized.

        Args:
            share: Share of the resource that all layers together keep, in (0, 1].
            resource: ``"parameters"``, ``"flops"``, ``"memory"`` or ``"seconds"``.

        Raises:
            ConfigError: When even the cheapest options cost more.
        """
        return [(start, self.proposal(share, resource, start)) for start in self.starts]

    def try_out(self, choices: Choices, start: Start | None = None) -> Trial:
        """Factorize, refit and measure some choices; the model stays dense."""
        return self._bench.trial(choices, start or Start())

    def best(self, share: float, resource: str = "parameters") -> Trial:
        """The proposal of least measured divergence, tried out; arguments as for `proposals`."""
        return self._bench.best(self._search, share, resource)

    def trials(self, share: float, resource: str, starts: Sequence[Start]) -> list[Trial]:
        """The proposals by some ways of judging errors, tried out, by rising divergence."""
        return self._bench.trials(self._search, share, resource, starts)

    def refined(self, trial: Trial) -> Trial:
        """A trial with all its factors moved towards the dense outputs; the trial's own layers are changed."""
        return self._bench.refined(trial)

    def adopt(self, trial: Trial) -> None:
        """Make a trial's layers the model's; nothing else can be tried afterwards."""
        adopt(self.model, self.layers, trial)


@contextmanager
def rank_chooser(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    step: Step | None = None,
    n_batches: int = N_BATCHES,
    **options: Any,
) -> Iterator[RankChooser]:
    """A chooser over a model, its attention opened meanwhile so that the projections can be chosen.

    Args:
        model: Any module, dense.
        data: Batches, as for `decompose`.
        step: Runs the model on a batch, as for `decompose`.
        n_batches: How many batches are used.
        options: For `RankChooser`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        >>> with rank_chooser(model, [torch.randn(64, 32) for _ in range(4)], progress=False) as chooser:
        ...     trials = [chooser.best(share) for share in (0.75, 0.5)]
        ...     chooser.adopt(trials[0])
        >>> trials[0].divergence < trials[1].divergence
        True
    """
    with opened(model):
        yield RankChooser(model, Batches.draw(data, n_batches, step) if data is not None else None, **options)
