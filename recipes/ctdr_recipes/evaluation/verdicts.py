"""Rules by which one technique beats another, and the promise: at one limit, each by its own plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ctdr_recipes.evaluation.rows import Row
from ctdr_recipes.evaluation.techniques import BUDGET_SHARE, CTDR, DECOMPOSED, DENSE, EXACT, TECHNIQUES

WINS, TIES, LOSES, NEITHER = "wins", "ties", "loses", "neither fits"
TIE = 0.02  # of the longer time: a smaller difference is one of the search, not of the techniques
OURS = (EXACT, CTDR)


def compared(ours: Row, other: Row) -> str:
    """One technique wins, ties or loses against another at the same limit.

    It wins where it fits and the other does not, or where both fit and it takes less time by more than `TIE`. Two that
    have one plan tie.

    Args:
        ours: One technique on a network.
        other: Another on the same network, at the same limit.
    """
    if ours.fits != other.fits:
        return WINS if ours.fits else LOSES
    if not ours.fits:
        return NEITHER
    if ours.seconds < (1 - TIE) * other.seconds:
        return WINS
    return LOSES if other.seconds < (1 - TIE) * ours.seconds else TIES


def keeps_promise(ours: Row, dense: Row) -> bool:
    """Whether a step keeps to 45 % of the dense peak and takes no longer than the dense one."""
    return ours.limit == BUDGET_SHARE and ours.fits and ours.seconds <= dense.seconds


def rivals_of(ours: str, known: Iterable[str]) -> list[str]:
    """The techniques that one of CTDR's is compared with: the exact ones, and with a cut all others.

    Args:
        ours: One of `OURS`.
        known: The techniques that have rows.
    """
    left_out = {DENSE, ours, *((DECOMPOSED, CTDR) if ours == EXACT else ())}
    there = set(known)
    return [name for name in TECHNIQUES if name in there and name not in left_out]


def by_net(rows: Iterable[Row], limit: float = BUDGET_SHARE) -> dict[str, dict[str, Row]]:
    """The rows of one limit by network and technique.

    Args:
        rows: Of one source.
        limit: A share of the dense peak.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.limit == limit:
            found.setdefault(row.net, {})[row.technique] = row
    return found


def tally(rows: Sequence[Row], ours: str, rival: str, limits: Iterable[float]) -> Counter[str]:
    """Number of wins, ties and losses over networks and limits.

    Args:
        rows: Of one source.
        ours: A technique.
        rival: Another.
        limits: Shares of the dense peak.
    """
    cells: list[Mapping[str, Row]] = [of for limit in limits for of in by_net(rows, limit).values()]
    return Counter(compared(of[ours], of[rival]) for of in cells if ours in of and rival in of)
