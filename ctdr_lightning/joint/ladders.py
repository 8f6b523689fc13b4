"""The ladders of the search: the candidate for each share of a resource, as far as it was tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def shares_within(dense_bytes: int, budget_bytes: int | None, peak_of: Callable[[float], int]) -> Sequence[float]:
    """The shares of a ladder from the largest that fits a budget on, after the next larger one.

    Peaks fall about evenly with the share, so shares that are far above the budget are passed over.

    Args:
        dense_bytes: Least peak of the dense model.
        budget_bytes: The budget; None for none.
        peak_of: From a share to its least peak.

    Example:
        >>> shares_within(1000, 130, lambda share: round(1000 * share))
        (0.17, 0.125, 0.0625)
    """
    shares = (1.0, *SHARES)
    if budget_bytes is None or dense_bytes <= budget_bytes:
        return shares
    over, over_bytes, place = 0, dense_bytes, 1
    while place < len(shares) and (peak_bytes := peak_of(shares[place])) > budget_bytes:
        fall = (over_bytes - peak_bytes) / (shares[over] - shares[place])
        wanted = shares[place] - (peak_bytes - budget_bytes) / fall if fall > 0 else 1.0
        over, over_bytes = place, peak_bytes
        place = max(place + 1, sum(share >= wanted for share in shares) - 1)
    while place - 1 > over and peak_of(shares[place - 1]) <= budget_bytes:
        place -= 1
    return shares[place - 1 :]


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
        self._tried: dict[tuple[float, str], list[Trial]] = {}
        self._whole: set[tuple[float, str]] = set()

    @property
    def _starts(self) -> tuple[Start, ...]:
        return self._best_first or self._bench.starts[::-1][: 1 if self._hurried else None]

    def rung(self, share: float, resource: str) -> Rung | None:
        """The candidate for a share of a resource; None if nothing is that cheap.

        It is the best trial's choices where the share was tried, else those of the way to judge errors that was best so
        far; before anything was tried, of all the evidence there is.
        """
        if tried := self._tried.get((share, resource)):
            return Rung(share, resource, tried[0].choices, tried[0].start)
        start = self._starts[0]
        try:
            choices = self._bench.choices(share, resource, start)
        except ConfigError:
            return None
        return Rung(share, resource, choices, start) if choices.factorized else None

    def keep(self, rung: Rung, trial: Trial) -> None:
        """Remember the present state of a trial: a refinement moves its factors in place."""
        own = self._tried.get((rung.share, rung.resource), [])
        own[:] = [trial if other.layers is trial.layers else other for other in own]

    def exact(self, rung: Rung) -> Trial:
        """The trial of a rung's own choices, which may have been made before."""
        own = self._tried.get((rung.share, rung.resource), [])
        same = (t for t in own if t.start == rung.start and t.choices.factorized == rung.choices.factorized)
        return next(same, None) or self._bench.trial(rung.choices, rung.start)

    def first(self, rung: Rung) -> Trial:
        """The best trial at a rung's share so far; of the best way to judge errors where there is none."""
        if (rung.share, rung.resource) not in self._tried:
            self._try(rung, self._starts[:1])
        return self._tried[rung.share, rung.resource][0]

    def best(self, rung: Rung) -> Trial:
        """The trial of least loss over the best ways to judge errors, at a rung's share."""
        key = rung.share, rung.resource
        if key not in self._whole:
            self._try(rung, self._starts[:_KEPT_STARTS] if self._whole else self._starts)
            self._whole.add(key)
            first = [trial.start for trial in self._tried[key] if trial.start is not None]
            self._best_first = (*first, *(start for start in self._starts if start not in first))
        return self._tried[key][0]

    def _try(self, rung: Rung, starts: Sequence[Start]) -> None:
        """Try a share in some ways as well, by rising loss."""
        key = rung.share, rung.resource
        known = self._tried.get(key, [])
        others = [start for start in starts if all(trial.start != start for trial in known)]
        if others and not (known and known[0].divergence <= self._enough()):
            made = self._bench.trials(*key, others, self._enough())
            self._tried[key] = sorted([*known, *made], key=lambda trial: trial.divergence)
