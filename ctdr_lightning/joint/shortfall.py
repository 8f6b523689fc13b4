"""The error where nothing keeps to the limits: the least peak that was found, and the memory or the time to ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.progress_bar import doing
from ctdr_lightning.basics.units import format_bytes, format_roomy
from ctdr_lightning.joint.budget_fit import CLOCK_ERROR
from ctdr_lightning.joint.considered import Considered
from ctdr_lightning.joint.priced_choice import Limits, PricedChoice
from ctdr_lightning.joint.pricing import Pricer
from ctdr_lightning.memory.plans.plan import Plan

# Predicted times are wrong by up to 5 %: so far a candidate may miss the limit and still be tried by the clock.
PREDICTION_ERROR = 1.05
_ROOM = 1.02  # 2 % less memory is not worth a longer step


class Shortfall:
    """Remembers the candidates of least peak, in any time and within the limit.

    Args:
        pricer: Prices their plans.

    Attributes:
        least: The candidate of least peak; None before one was noted.
    """

    def __init__(self, pricer: Pricer) -> None:
        self._pricer = pricer
        self.least: PricedChoice | None = None
        self._least_in_time: PricedChoice | None = None

    def note(self, found: PricedChoice, limits: Limits) -> None:
        """Remember a candidate if none has a smaller peak."""
        self.least = _lesser(self.least, found)
        if self._pricer.slowdown(found.trace.seconds) <= limits.slowdown * PREDICTION_ERROR:
            self._least_in_time = _lesser(self._least_in_time, found)

    def error(self, limits: Limits, rows: Iterable[Considered], remedy: str = "") -> InfeasibleBudgetError:
        """The error; its hint names memory or time that the next run accepts.

        Args:
            limits: To which no candidate keeps.
            rows: All candidates.
            remedy: A hint in the place of that.
        """
        assert self.least is not None
        row, least = self.least.row, self._thriftiest(self.least, math.inf)
        layers = "dense layers" if row.resource == "dense" else f"layers cut to {row.share:.0%} of their {row.resource}"
        wanted = format_bytes(limits.peak_bytes) if limits.peak_bytes else "the loss and the time allowed"
        return InfeasibleBudgetError(
            f"No ranks and plan fit {wanted}{within(limits)}: the least peak found is "
            f"{format_bytes(least.peak_bytes)}, with {layers} and x{self._slowdown(least):.2f} of the dense step's "
            f"time, where the outputs' KL is {row.loss:.4f} nats.",
            remedy or self._remedy(least, limits, [row for row in rows if row.seconds]),
            least_peak_bytes=least.peak_bytes,
        )

    def spared(self, limits: Limits, dense: PricedChoice, means: str, *, cuts: bool) -> InfeasibleBudgetError:
        """The error where the caller has an exact means, and the search none so far.

        Args:
            limits: To which the dense model does not keep.
            dense: The dense model.
            means: The caller's.
            cuts: Whether cuts that lose next to nothing were tried.
        """
        assert limits.peak_bytes is not None
        least_bytes = dense.row.peak_bytes
        budget, least = format_bytes(limits.peak_bytes), format_bytes(least_bytes)
        tried = "No cut that loses next to nothing fits" if cuts else "No recomputation alone fits"
        above = f"; the dense model's least peak is {least}"
        more = f"Raise memory_budget to {format_roomy(least_bytes)}"
        if dense.plan is not None:  # one that takes too long
            above, more = "", "Allow a longer step with max_slowdown"
        return InfeasibleBudgetError(
            f"{tried} {budget}{within(limits)}{above}.",
            f'{more}, or allow any cut with rank="auto".',
            least_peak_bytes=least_bytes,
            means=means,
        )

    @doing("plan")
    def _thriftiest(self, found: PricedChoice, seconds: float) -> Plan:
        """A candidate's plan of least peak within a time: its row may name a floor, which no plan reaches."""
        return self._pricer.planned(found.trace, seconds=seconds)

    def _slowdown(self, made: Plan) -> float:
        return self._pricer.slowdown(self._pricer.seconds(made))

    def _in_time(self, least: Plan, slowdown: float) -> Plan | None:
        """The plan of least peak within the time; None where nothing is that fast."""
        found = self._least_in_time
        if found is None or self._slowdown(least) <= slowdown:  # a second search might end with less, by the clock
            return least if found is not None else None
        return self._thriftiest(found, self._pricer.room_s(found.trace, slowdown))

    def _remedy(self, least: Plan, limits: Limits, fitting: list[Considered]) -> str:
        """The time or memory that is enough, given a plan of least peak that may take long."""
        if limits.peak_bytes is None:
            return f"Raise max_slowdown to {_allowing(self._pricer.slowdown(least.trace.seconds))}."
        within = self._in_time(least, limits.slowdown)
        enough = format_roomy(within.peak_bytes) if within and within.peak_bytes > limits.peak_bytes else None
        if fitting:
            best = min(fitting, key=lambda row: row.seconds)
            slowdown = max(best.measured_slowdown, self._pricer.slowdown(best.seconds))
            more = f", or memory_budget to {enough}" if enough else ""
            return f"It fits at x{slowdown:.2f}: raise max_slowdown to {_allowing(slowdown)}{more}."
        ways = [enough] if enough else []
        if not within or _ROOM * least.peak_bytes < within.peak_bytes:
            ways.append(f"{format_roomy(least.peak_bytes)} with max_slowdown {_allowing(self._slowdown(least))}")
        if not ways:  # the plan of least peak fits, and no search for the budget found it
            ways.append(format_roomy(round(_ROOM * limits.peak_bytes)))
        return f"Raise memory_budget to {', or to '.join(ways)}, or use a smaller batch."


def within(limits: Limits) -> str:
    """The time allowed, in words; empty for any."""
    return f" within x{limits.slowdown:.3g} of the dense step's time" if math.isfinite(limits.slowdown) else ""


def _lesser(held: PricedChoice | None, found: PricedChoice) -> PricedChoice:
    return found if held is None or found.row.peak_bytes <= held.row.peak_bytes else held


def _allowing(slowdown: float) -> str:
    return f"{slowdown + CLOCK_ERROR - 1:.2f}"
