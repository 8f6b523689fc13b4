"""A candidate with its price, and the limits that it is held against."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ctdr_lightning.decomposition.trials.bench import Trial
from ctdr_lightning.joint.considered import Considered
from ctdr_lightning.joint.ladders import Rung
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.traces.trace import Trace

_PATIENCE = 2  # so many shares in a row may have a larger peak than the least of their ladder


@dataclass(frozen=True)
class Limits:
    """Limits of the answer's step.

    Attributes:
        peak_bytes: Largest true peak of a step; None asks for the least.
        slowdown: Longest step, in dense steps.
        wished: Whether a longer step is better than a loss of accuracy, and than no answer.
    """

    peak_bytes: int | None
    slowdown: float
    wished: bool = False


@dataclass(frozen=True)
class PricedChoice:
    """A rung with its price, its plan and, as far as it came, its factors and its time.

    Attributes:
        rung: The candidate.
        trace: Its step, recorded on fake tensors, with all resident bytes and everything that follows it.
        row: Its record; the ``outcome`` is empty as long as it may be the answer.
        plan: Its plan; None where none fits.
        trial: Its factors; None for the dense model, and before they were computed.
        measured_peak_bytes: Its peak as counted in a run; 0 before one, and where it ran out of memory.
    """

    rung: Rung
    trace: Trace
    row: Considered
    plan: Plan | None = None
    trial: Trial | None = None
    measured_peak_bytes: int = 0

    @property
    def may_be(self) -> bool:
        """Whether nothing speaks against it so far."""
        return not self.row.outcome

    def told(self, **changes: Any) -> PricedChoice:
        """The same with other entries in its row."""
        return replace(self, row=replace(self.row, **changes))


def while_falling(ladder: Iterator[PricedChoice]) -> Iterator[PricedChoice]:
    """The next candidates of a ladder, until some in a row have larger peaks than the least of them."""
    least, n_larger = math.inf, 0
    for found in ladder:
        yield found
        n_larger = n_larger + 1 if found.row.peak_bytes >= least else 0
        least = min(least, found.row.peak_bytes)
        if n_larger == _PATIENCE:
            return
