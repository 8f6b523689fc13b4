"""The candidates of the joint search as data, and the few of them that a user would choose among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctdr_lightning.basics.units import format_bytes

CHOSEN, GIVEN = "chosen", "given"  # outcomes of the answer
_MOST_OPTIONS = 6
OPTION_HEAD = ("", "model", "parameters", "peak", "time", "loss (nats)")


@dataclass(frozen=True)
class Considered:
    """One candidate that the search looked at.

    Attributes:
        share: Share of the resource that all layers keep together; 1 is the dense model.
        resource: ``"parameters"`` or ``"seconds"``.
        parameters: Parameters of the model.
        keep_peak_bytes: Predicted peak of its step without a plan.
        peak_bytes: Predicted peak under its plan; the least of any where none fits, or none can be fast enough.
        seconds: Predicted seconds under its plan; 0 where it has none.
        loss: Measured KL(dense || candidate) in nats; -1 where it was not measured.
        measured_slowdown: Its step in dense steps, timed in turns; 0 where it was not timed.
        outcome: Its outcome, in words; the answer's begins with ``"chosen"`` and has the reason after a colon.
        metric: Its metric, refined; None where it was not measured.
    """

    share: float
    resource: str
    parameters: int
    keep_peak_bytes: int
    peak_bytes: int
    seconds: float
    loss: float
    measured_slowdown: float
    outcome: str
    metric: float | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether it is the answer."""
        return self.outcome.partition(":")[0] in (CHOSEN, GIVEN)

    @property
    def reason(self) -> str:
        """The rule of the search that chose it; empty for all others, and where it was given."""
        return self.outcome.partition(": ")[2] if self.is_chosen else ""


@dataclass(frozen=True)
class Option:
    """One way to train a model under a budget, with its costs.

    Attributes:
        model: ``"dense"``, or the share of a resource that its layers keep.
        parameters: Parameters of the model.
        peak_bytes: Predicted peak of a step under its plan; where no plan fits, the least of all plans.
        slowdown: Its step in steps of the dense model; 0 where no plan fits.
        is_timed: Whether the clock measured that; otherwise it is predicted.
        loss: KL(dense || it) of the outputs in nats, before any training.
        is_chosen: Whether it is the answer.
        reason: The rule of the search that chose it; empty for all others.
    """

    model: str
    parameters: int
    peak_bytes: int
    slowdown: float
    is_timed: bool
    loss: float
    is_chosen: bool
    reason: str = ""

    def cells(self) -> tuple[str, ...]:
        """A row under `OPTION_HEAD`.

        Example:
            >>> Option("dense", 1000, 2**20, 1.25, True, 0.0, True).cells()
            ('>', 'dense', '1,000', '1.0 MiB', 'x1.25 timed', '0')
        """
        mark, loss = ">" if self.is_chosen else "", f"{self.loss:.4f}" if self.loss else "0"
        if not self.slowdown:
            return mark, self.model, f"{self.parameters:,}", f"at least {format_bytes(self.peak_bytes)}", "", loss
        time = f"x{self.slowdown:.2f} {'timed' if self.is_timed else 'predicted'}"
        return mark, self.model, f"{self.parameters:,}", format_bytes(self.peak_bytes), time, loss


def options_of(considered: Sequence[Considered], dense_s: float) -> tuple[Option, ...]:
    """At most six: the dense model, the chosen one, and those that no other beats in time and loss.

    Args:
        considered: All candidates.
        dense_s: Seconds of the dense step.

    Returns:
        By rising loss.
    """
    dense = [row for row in considered if row.resource == "dense"]
    ends = [*dense, *(row for row in considered if row.is_chosen and row not in dense)]
    rest = [row for row in considered if row not in ends and row.seconds and row.loss >= 0]
    front = [row for row in rest if not any(_beats(other, row, dense_s) for other in (*ends, *rest) if other != row)]
    shown = [*ends, *sorted(front, key=lambda row: row.loss)][:_MOST_OPTIONS]
    return tuple(_option(row, dense_s) for row in sorted(shown, key=lambda row: row.loss))


def _beats(one: Considered, other: Considered, dense_s: float) -> bool:
    faster = _slowdown(one, dense_s) <= _slowdown(other, dense_s)
    return bool(one.seconds) and faster and one.loss <= other.loss


def _slowdown(row: Considered, dense_s: float) -> float:
    return row.measured_slowdown or row.seconds / dense_s


def _option(row: Considered, dense_s: float) -> Option:
    return Option(
        model="dense" if row.resource == "dense" else f"{row.share:.0%} of the {row.resource}",
        parameters=row.parameters,
        peak_bytes=row.peak_bytes,
        slowdown=_slowdown(row, dense_s) if row.seconds else 0.0,
        is_timed=bool(row.measured_slowdown),
        loss=0.0 if row.resource == "dense" else row.loss,
        is_chosen=row.is_chosen,
        reason=row.reason,
    )
