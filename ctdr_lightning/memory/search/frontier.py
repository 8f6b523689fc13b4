"""The best plans found so far, one for each trade of bytes against seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ctdr_lightning.memory.simulator.actions import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action

CHOICES = (KEEP, RECOMPUTE, RECOMPUTE_EACH)
Others = Mapping[int, tuple[Action, ...]]
"""Other actions that some values can be given: a codec, a link to each place. Their choices follow ``CHOICES``."""


def action_for(value: int, choice: int, others: Others) -> Action:
    """The action that a choice is for a value."""
    return CHOICES[choice] if choice < len(CHOICES) else others[value][choice - len(CHOICES)]


@dataclass(frozen=True, slots=True)
class Point:
    """One plan.

    Attributes:
        peak_bytes: Its simulated peak.
        seconds: Its simulated time.
        state: For each item of the frontier the index of its action in ``CHOICES``, or beyond them.
    """

    peak_bytes: int
    seconds: float
    state: bytes


class Frontier:
    """Plans of which none is both smaller and faster than another, by ascending peak.

    Args:
        items: The values whose actions differ from plan to plan.
        default: Their default actions, as indices into ``CHOICES``.
        others: Further actions of some values.
    """

    def __init__(self, items: Sequence[int], default: bytes, others: Others | None = None) -> None:
        self.items = items
        self.default = default
        self._others = others or {}
        self._points: list[Point] = []

    def copy(self) -> Frontier:
        """The same plans, to go on from."""
        twin = Frontier(self.items, self.default, self._others)
        twin._points = list(self._points)
        return twin

    @property
    def least(self) -> Point:
        """The plan with the least peak."""
        return self._points[0]

    def add(self, peak_bytes: int, seconds: float, state: Callable[[], bytes]) -> bool:
        """Enter a plan, unless another is as good; plans that it dominates are removed. Returns whether it was new."""
        after = bisect_right(self._points, peak_bytes, key=lambda p: p.peak_bytes)
        if after and self._points[after - 1].seconds <= seconds:
            return False
        first = bisect_left(self._points, peak_bytes, key=lambda p: p.peak_bytes)
        last = bisect_right(self._points, -seconds, key=lambda p: -p.seconds)
        self._points[first : max(first, last)] = [Point(peak_bytes, seconds, state())]
        return True

    def at(self, peak_bytes: int) -> Point | None:
        """The fastest plan whose peak fits; None where none does."""
        after = bisect_right(self._points, peak_bytes, key=lambda p: p.peak_bytes)
        return self._points[after - 1] if after else None

    def within(self, seconds: float) -> Point | None:
        """The plan with the least peak that takes no longer; None where none does."""
        first = bisect_left(self._points, -seconds, key=lambda p: -p.seconds)
        return self._points[first] if first < len(self._points) else None

    def actions(self, point: Point) -> dict[int, Action]:
        """A plan's actions, where they are not the default."""
        chosen = zip(self.items, point.state, self.default, strict=True)
        return {v: action_for(v, choice, self._others) for v, choice, default in chosen if choice != default}

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)
