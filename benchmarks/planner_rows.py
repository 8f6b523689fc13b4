"""The rows of ``benchmarks.planner``: as lines, as JSON, and as the tables of ``docs/policies.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from benchmarks.figures import markdown, rows_of

# A policy counts as ahead where its plan is faster by more than this share.
AHEAD = 1e-3
SMALL_GAP = 0.01


@dataclass(frozen=True)
class Row:
    """One net at one budget; slowdowns are over the plain step, None where nothing fits.

    Attributes:
        net: Its name.
        n_ops: Ops of its step.
        share: The budget as a share of the plain peak above the weights.
        slowdown: Time of ``auto``'s plan.
        gap: By how much that is above the lower bound, as a share of it.
        rival: The fastest other policy; empty where none was asked or none fits.
        rival_slowdown: Time of its plan.
        plan_s: Process time of ``auto``, the bound's included.
        proven: Whether it is proven that no plan fits.
    """

    net: str
    n_ops: int
    share: float
    slowdown: float | None
    gap: float | None
    rival: str
    rival_slowdown: float | None
    plan_s: float
    proven: bool

    @property
    def ahead(self) -> bool:
        """Whether another policy is ahead."""
        best = float("inf") if self.slowdown is None else self.slowdown
        return self.rival_slowdown is not None and self.rival_slowdown < best * (1 - AHEAD)

    def __str__(self) -> str:
        missing = f"{'floor' if self.proven else 'none':>15s}"
        found = missing if self.gap is None else f"x{self.slowdown:.4f} {self.gap:7.2%}"
        rival = f"{self.rival} x{self.rival_slowdown:.4f}" if self.rival else ""
        return f"{self.net:16s} {self.n_ops:6d} {self.share:6.2f} {found} {self.plan_s:8.2f}  {rival}"


def summary(rows: Sequence[Row]) -> list[str]:
    """What the rows say together, a sentence a line."""
    gaps = sorted(row.gap for row in rows if row.gap is not None)
    small = sum(gap < SMALL_GAP for gap in gaps)
    fitting = [f"Of {len(rows)} rows {sum(row.proven for row in rows)} are proven not to fit"]
    if gaps:
        fitting.append(
            f"{len(gaps)} have a plan: the median gap is {median(gaps):.2%}, {small / len(gaps):.0%} are under "
            f"{SMALL_GAP:.0%}, the largest is {gaps[-1]:.2%}"
        )
    nothing = sum(row.gap is None and not row.proven for row in rows)
    seconds = [row.plan_s for row in rows]
    return [
        "; ".join(fitting) + ".",
        f"Nothing is found and nothing proven in {nothing}.",
        f"Another policy is ahead in {sum(row.ahead for row in rows)}.",
        f"Planning takes {median(seconds):.1f} s in the median and {max(seconds):.1f} s at most.",
    ]


def _gaps(text: str) -> str:
    rows: list[Row] = rows_of(text, "rows", Row)
    shares = sorted({row.share for row in rows}, reverse=True)
    lines = [["net (ops)", *(f"{share:g}" for share in shares), "longest, s"]]
    for (net, n_ops), of in groupby(rows, lambda row: (row.net, row.n_ops)):
        by_share = {row.share: row for row in of}
        cells = [_cell(by_share.get(share)) for share in shares]
        longest = max(row.plan_s for row in by_share.values())
        lines.append([f"{net} ({n_ops:,})", *cells, f"{longest:.1f}"])
    return markdown(text, lines)


def _cell(row: Row | None) -> str:
    """The gap; floor where it is proven that nothing fits; nothing where the row was not run."""
    if row is None:
        return ""
    if row.gap is None:
        return "floor" if row.proven else "none"
    return f"{row.gap:.2%}" + f" ({row.rival} is ahead)" * row.ahead


def _sentences(text: str) -> str:
    return " ".join(summary(rows_of(text, "rows", Row))) + "\n"


PARTS: dict[str, Callable[[str], str]] = {"gaps": _gaps, "summary": _sentences}


def part(text: str, name: str) -> str:
    """A part of the documents from a ``planner.json``: ``gaps``, a table, or ``summary``, sentences."""
    return PARTS[name](text)
