"""Connected evicted values and the sum of their costs, by union-find (DTR, appendix)."""

from __future__ import annotations

SMALL_SHARE = 0.01  # the paper's: evicting values under 1 % of the mean size frees nothing


class EvictedSet:
    """A union-find node: connected evicted values and the sum of their costs."""

    __slots__ = ("cost", "parent")

    def __init__(self, cost: float) -> None:
        self.parent: EvictedSet | None = None
        self.cost = cost

    def root(self) -> EvictedSet:
        """The representative, with path halving."""
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent
            node = node.parent
        return node

    def join(self, other: EvictedSet) -> None:
        """Merge with another set."""
        a, b = self.root(), other.root()
        if a is not b:
            b.parent = a
            a.cost += b.cost
