"""The ladders of the search: the candidate for each share of a resource, as far as it was tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.by_share import Start
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.trials.bench import Bench, Trial

# Halves and thirds; the search also looks between two of them. Below 1/16 every network that was tried lost over five
# points of accuracy.
SHARES = (0.75, 0.5, 0.33, 0.25, 0.17, 0.125, 0.0625)
# Of two harmless cuts the faster one is wanted: the ladder of seconds comes first.
RESOURCES = ("seconds", "parameters")
# The first rung is tried in every way of judging errors, the others in the two that were best for the one before.
_KEPT_STARTS = 2


def between(above: float, below: float) -> float:
    """The share between two others, in three digits."""
    return round(math.sqrt(above * below), 3)


@dataclass(frozen=True)
class Rung:
    """One share of a resource, and the choices that it buys; nothing is computed yet.

    Attributes:
        share: Share of the resource that all layers keep together; 1 is the dense model.
        resource: The resource; for the dense model "dense", for choices that were given "given".
        choices: The choice for each layer.
        start: Weighting of the layers' errors.
    """

    share: float
    resource: str
    choices: Choices
    start: Start | None = None


DENSE = Rung(1.0, "dense", Choices({}))


class Ladders:
    """Remembers the trials at each share, and the best weightings of errors.

    Args:
        bench: Makes choices and tries them.
        hurried: Whether every rung is tried in one way alone, for models whose steps take seconds.
        enough: A divergence, in nats, at which no other way is tried; asked for with the first trial.
    """

    def __init__(self, bench: Bench, hurried: bool = False, enough: Callable[[], float] = lambda: 0.0) -> None:
        self._bench, self._hurried, self._enough = bench, hurried, enough
        self._best_first: tuple[Start, ...] = ()
        self._tried: dict[tuple[float, str], Trial] = {}

    @property
    def _starts(self) -> tuple[Start, ...]:
        return self._best_first or self._bench.starts[::-1][: 1 if self._hurried else None]

    def rung(self, share: float, resource: str) -> Rung | None:
        """The candidate for a share of a resource; None if nothing is that cheap.

        It is the best trial's choices where the share was tried, else those of the way to judge errors that was best so
        far; before anything was tried, of all the evidence there is.
        """
        tried = self._tried.get((share, resource))
        if tried is not None:
            return Rung(share, resource, tried.choices, tried.start)
        start = self._starts[0]
        try:
            choices = self._bench.choices(share, resource, start)
        except ConfigError:
            return None
        return Rung(share, resource, choices, start) if choices.factorized else None

    def keep(self, rung: Rung, trial: Trial) -> None:
        """Remember the present state of a trial: a refinement moves its factors in place."""
        key = rung.share, rung.resource
        if key in self._tried and self._tried[key].layers is trial.layers:
            self._tried[key] = trial

    def best(self, rung: Rung) -> Trial:
        """The trial of least loss over the best ways to judge errors, at a rung's share."""
        key = rung.share, rung.resource
        if key not in self._tried:
            starts = self._starts[:_KEPT_STARTS] if self._tried else self._starts
            trials = self._bench.trials(*key, starts, self._enough())
            first = [trial.start for trial in trials]
            self._best_first = (*first, *(start for start in self._starts if start not in first))
            self._tried[key] = trials[0]
        return self._tried[key]
