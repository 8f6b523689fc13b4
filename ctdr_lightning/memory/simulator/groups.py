"""Which dropped values are connected: the groups whose effects make up a plan's timeline, under changing actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ctdr_lightning.memory.simulator.trace_index import TraceIndex

Group = frozenset[int]
Flags = tuple[bool, bool]


class Groups:
    """The groups of dropped values that share op calls.

    Attributes:
        drops: For each value whether it is dropped; unsaved values are, unless they are held.
        stays: For each value whether a replay that passes it leaves it behind.
        of: For each value the index of its group; -1 for one that no replay passes.
        members: The values of each group by its index.
        work: How many values were looked at so far; a measure of time that is the same on every machine.
    """

    def __init__(self, index: TraceIndex) -> None:
        self._index = index
        self.drops = [d and not s for d, s in zip(index.droppable, index.saved, strict=True)]
        self.stays = list(index.saved)
        self.of = [-1] * len(index.saved)
        self.members: dict[int, Group] = {}
        self.work = 0

    def regroup(self, former: Mapping[int, Flags]) -> tuple[set[int], list[Group]]:
        """Regroup after flags have changed.

        Args:
            former: For each changed value whether it was dropped and whether it stayed before.

        Returns:
            Indices of the groups that are no more, and the groups that take their place.
        """
        if all(drops == self.drops[value] for value, (drops, _) in former.items()):
            same = {self.of[value] for value in former} - {-1}
            self.work += sum(len(self.members[index]) for index in same)
            return same, [self.members[index] for index in same]
        gone = self._indices(u for v in former for u in (v, *self._index.near[v]))
        region = set(former).union(*(self.members[index] for index in gone))
        saved, drops = self._index.saved, self.drops
        found = self._closure([v for v in region if saved[v] and drops[v]])
        fringe: Iterable[int] = found
        while more := self._indices(u for v in fringe for u in self._index.near[v]) - gone:
            gone |= more
            fringe = [v for index in more for v in self.members[index]]
            found.update(fringe)
        self.work += len(region) + len(found)
        return gone, self._components(found)

    def attach(self, index: int, group: Group) -> None:
        """Enter a group."""
        self.members[index] = group
        for value in group:
            self.of[value] = index

    def detach(self, index: int) -> None:
        """Take a group out."""
        for value in self.members.pop(index):
            if self.of[value] == index:
                self.of[value] = -1

    def _indices(self, values: Iterable[int]) -> set[int]:
        of = self.of
        found = {of[value] for value in values}
        found.discard(-1)
        return found

    def _closure(self, roots: Iterable[int]) -> set[int]:
        """Roots and every dropped value on the way back from them."""
        sources, op_of, drops = self._index.sources, self._index.op_of, self.drops
        found: set[int] = set()
        stack = list(roots)
        while stack:
            value = stack.pop()
            if value not in found and drops[value]:
                found.add(value)
                stack.extend(sources[op_of[value]])
        return found

    def _components(self, members: set[int]) -> list[Group]:
        near, left, groups = self._index.near, set(members), []
        for first in members:
            if first not in left:
                continue
            left.discard(first)
            group, stack = [first], [first]
            while stack:
                for value in near[stack.pop()]:
                    if value in left:
                        left.discard(value)
                        group.append(value)
                        stack.append(value)
            groups.append(frozenset(group))
        return groups
