"""Allowed loss of accuracy: a divergence of the outputs, or a drop of a metric.

Either limit applies to refined factors, because the user gets these. But a refinement takes seconds, so only a
candidate that would be the answer is refined. The others are judged by the expected gain of a refinement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, Protocol

from ctdr_lightning.decomposition.trials.bench import Trial
from ctdr_lightning.joint.metric import MetricJudge

# Largest factor by which a refinement lowers the divergence: .0099 to .0031 nats on C at x16, .0005 to .0002 on
# V at x6, .52 to .14 on a character GPT at x4; and how much more than the last refinement the next one may win. A share
# of right answers went with it or less: its drop fell to between a third and all on C, V, R and G at x2 to x8.
_REFINED_GAIN, _GAIN_SPREAD = 4.0, 1.2
_ROOM = 1.05  # a second run's factors differ a little


class Settled(NamedTuple):
    """A trial that was checked against the allowance.

    Attributes:
        trial: Refined where that was needed.
        outcome: Why it cannot be the answer; empty where it can.
        metric: Its metric; None where none is asked for.
    """

    trial: Trial
    outcome: str = ""
    metric: float | None = None


class Allowance(Protocol):
    """Checks trials against the allowed loss."""

    @property
    def forbids_cuts(self) -> bool:
        """Whether no trial is within it, whatever it loses."""

    def excludes(self, trial: Trial) -> bool:
        """Whether no refinement can be expected to bring a trial within the limit."""

    def refusal(self, trial: Trial) -> str:
        """Why a candidate that fits is not worth a refinement; empty where it is."""

    def settled(self, trial: Trial) -> Settled:
        """Check a candidate that would be the answer against the limit."""

    def remedy(self) -> str:
        """The arguments for the best refused trial; empty if there is none."""


class AllowedLoss:
    """A largest divergence of the outputs.

    Args:
        most: In nats, asked for when a trial is checked; None allows any.
        refined: Moves a trial's factors towards the dense outputs.
    """

    def __init__(self, most: Callable[[], float | None], refined: Callable[[Trial], Trial]) -> None:
        self._ask, self._refined = most, refined
        self._gain, self._least_refused = _REFINED_GAIN, math.inf

    @cached_property
    def _most(self) -> float | None:
        return self._ask()

    @property
    def forbids_cuts(self) -> bool:
        """Whether nothing may be lost: of an untrained network, say, whose outputs do not tell."""
        return self._most == 0.0

    def excludes(self, trial: Trial) -> bool:
        """Whether no refinement can be expected to bring a trial's loss within the limit."""
        return self._most is not None and trial.divergence > _still_to_win(trial, self._gain) * self._most

    def refusal(self, trial: Trial) -> str:
        """Why a candidate that fits is not worth a refinement; empty where it is."""
        return self._refused(trial) if self.excludes(trial) else ""

    def settled(self, trial: Trial) -> Settled:
        """Check a trial against the allowed loss: unrefined first, else refined, as the user gets it."""
        if self._most is None or trial.divergence <= self._most:
            return Settled(trial)
        refined = self._refined(trial)
        self._gain = self._gain if trial.refined else min(self._gain, _gain(trial, refined))
        return Settled(refined, "" if refined.divergence <= self._most else f"{self._refused(refined)}, refined too")

    def remedy(self) -> str:
        """The arguments for the best refused trial; empty if there is none."""
        return _remedy("The least KL", self._least_refused)

    def _refused(self, trial: Trial) -> str:
        self._least_refused = min(self._least_refused, trial.divergence)
        return f"its loss is over {self._most:g}"


class AllowedDrop:
    """A largest drop of a metric from the dense model's.

    Refined factors decide. A refinement is skipped if the unrefined drop, scaled by the largest gain seen so far, would
    still exceed the limit. A trial whose outputs are farther from the dense ones than those of a refused trial is
    assumed to be no better, and its metric is not measured.

    Args:
        most: In the metric's own unit.
        refined: Moves a trial's factors towards the dense outputs.
        judge: Knows the dense model's metric.
        value: The metric of a trial.
    """

    def __init__(
        self, most: float, refined: Callable[[Trial], Trial], judge: MetricJudge, value: Callable[[Trial], float]
    ) -> None:
        self._most, self._refined, self._judge, self._value = most, refined, judge, value
        self._gain, self._least_refused = _REFINED_GAIN, math.inf
        self._values: dict[float, float] = {}  # by divergence
        # Divergences in nats, up to where and from where on the metric is known; refined, and before.
        self._farthest_good, self._nearest_bad, self._nearest_hopeless = 0.0, math.inf, math.inf

    @property
    def forbids_cuts(self) -> bool:
        """No: a metric may be as good as before."""
        return False

    def excludes(self, trial: Trial) -> bool:
        """Whether a trial's metric, refined as far as can be expected, still falls too much."""
        far, gain = trial.divergence, _still_to_win(trial, self._gain)
        if not far < min(gain * self._nearest_bad, self._nearest_hopeless):
            return True
        if far <= self._farthest_good or self._drop(trial)[1] <= gain * self._most:
            return False
        self._nearest_hopeless = far
        return True

    def refusal(self, trial: Trial) -> str:
        """Why a candidate that fits is not worth a refinement; empty where it is."""
        return f"{self._judge.name} is worse by over {self._most:g}" if self.excludes(trial) else ""

    def settled(self, trial: Trial) -> Settled:
        """Refine a trial, as it will be, and hold its metric against the drop allowed."""
        refined = self._refined(trial)
        self._gain = self._gain if trial.refined else min(self._gain, _gain(trial, refined))
        value, drop = self._drop(refined)
        if drop <= self._most:
            return Settled(refined, metric=value)
        self._least_refused = min(self._least_refused, drop)
        outcome = f"{self._judge.name} is worse by {drop:.4g}, over {self._most:g}, refined too"
        return Settled(refined, outcome, value if math.isfinite(value) else None)

    def remedy(self) -> str:
        """The arguments for the best refused trial; empty if there is none."""
        return _remedy(f"The least drop of {self._judge.name}", self._least_refused)

    def _drop(self, trial: Trial) -> tuple[float, float]:
        """A trial's metric, and how much worse that is; measured once."""
        far = trial.divergence
        if far not in self._values:
            self._values[far] = self._value(trial)
        drop = self._judge.drop(self._values[far])
        if drop <= self._most:
            self._farthest_good = max(self._farthest_good, far)
        else:
            self._nearest_bad = min(self._nearest_bad, far)
        return self._values[far], drop


def _still_to_win(trial: Trial, gain: float) -> float:
    """Largest factor by which a refinement can still lower a trial's divergence."""
    return 1.0 if trial.refined else gain


def _gain(before: Trial, after: Trial) -> float:
    return _GAIN_SPREAD * before.divergence / max(after.divergence, 1e-12)


def _remedy(what: str, least: float) -> str:
    if not math.isfinite(least):
        return ""
    return f"{what} of a candidate that fits the memory is {least:.4g}: write max_loss={_ROOM * least:.3g}."
