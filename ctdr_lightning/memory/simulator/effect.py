"""Effect of dropping a connected group of values: when they come back, the replays' cost, and the lives they prolong.

Dropped values that no dropped value connects live and return independently of each other, so a plan's timeline is the
plain timeline plus a sum of such effects, and the change of one action changes one effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ctdr_lightning.memory.simulator.trace_index import UNPACK, TraceIndex


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one group on the timeline.

    Attributes:
        intervals: ``(first tick, last tick, bytes)`` of each value that a replay leaves behind.
        bumps: ``(tick, bytes)`` of each replay's own peak.
        needs: For each value outside the group that the replays read, the last tick at which one does.
        seconds: Time of all replays.
        work: Members, and ops that were played; a measure of the time that finding the effect took.
        replays: ``(tick, seconds, ops)`` of each replay.
        left: For ``(tick of a replay, value)`` the last tick at which the replay's output is live; the replay's own
            tick if it ends with the replay. Values that the replay needs for itself are not in it.
    """

    intervals: list[tuple[int, int, int]]
    bumps: list[tuple[int, int]]
    needs: dict[int, int]
    seconds: float
    work: int
    replays: list[tuple[int, float, list[int]]]
    left: dict[tuple[int, int], int]

    def bytes_at(self, tick: int) -> int:
        """Bytes that it adds at a tick, prolonged lives not included."""
        stays = sum(n_bytes for first, last, n_bytes in self.intervals if first <= tick <= last)
        return stays + sum(n_bytes for at, n_bytes in self.bumps if at == tick)


def effect_of(index: TraceIndex, stays: Sequence[int], members: Collection[int]) -> Effect:
    """Play the backward for one group of dropped values.

    Args:
        index: The recorded step.
        stays: For each value whether a replay that passes it leaves it behind for those who still want it.
        members: Value ids, connected through the ops that make them.

    Returns:
        The group's effect. Linear in the group's ops times the replays that it needs.
    """
    group = _Group(index, stays, members)
    for tick, kind, value, released in sorted([event for v in members for event in index.events[v]]):
        if kind == UNPACK:
            group.unpack(value, tick, released)
        else:
            group.handles[value] -= 1
            group.unref([value], tick)
    return Effect(group.intervals, group.bumps, group.needs, group.seconds, group.work, group.replays, group.left)


class _Group:
    """The state of a group while its part of the backward is played; mirrors the tape's reference counts.

    Attributes:
        handles: Live handles of autograd on each member.
        refs: Handles and op calls that hold each value.
        linked: Members for which each op call is still held.
        back: When each member that is there again was made.
    """

    __slots__ = (
        "back", "bumps", "handles", "index", "intervals", "left", "linked", "needs", "refs", "replays", "seconds",
        "stays", "work",
    )  # fmt: skip

    def __init__(self, index: TraceIndex, stays: Sequence[int], members: Collection[int]) -> None:
        self.index = index
        self.stays = stays
        self.handles = {v: index.n_saves[v] for v in members}
        self.refs = dict(self.handles)
        self.linked: dict[int, int] = {}
        for value in members:
            op = index.op_of[value]
            self.linked[op] = self.linked.get(op, 0) + 1
        for op in self.linked:
            for source in index.sources[op]:
                self.refs[source] = self.refs.get(source, 0) + 1
        self.back: dict[int, int] = {}
        self.needs: dict[int, int] = {}
        self.intervals: list[tuple[int, int, int]] = []
        self.bumps: list[tuple[int, int]] = []
        self.replays: list[tuple[int, float, list[int]]] = []
        self.left: dict[tuple[int, int], int] = {}
        self.seconds = 0.0
        self.work = len(members)

    def unpack(self, value: int, tick: int, released: int) -> None:
        """Autograd asks for a member and keeps it until ``released``."""
        if value in self.back or self.index.alive_until[value] >= tick:
            return
        self._replay(self._missing_ops(value, tick), value, tick)
        if value not in self.back:
            self.left[tick, value] = max(released, tick)
            if released > tick:
                self.intervals.append((tick + 1, released, self.index.n_bytes[value]))

    def _missing_ops(self, target: int, tick: int) -> list[int]:
        index, handles, back = self.index, self.handles, self.back
        found: set[int] = set()
        stack = [target]
        while stack:
            value = stack.pop()
            if value in handles and value not in back and index.alive_until[value] < tick:
                op = index.op_of[value]
                if op not in found:
                    found.add(op)
                    stack.extend(index.sources[op])
        return sorted(found)

    def _replay(self, ops: list[int], target: int, tick: int) -> None:
        index = self.index
        self.work += len(ops)
        uses = {target: 1}
        for op in ops:
            for source in index.sources[op]:
                uses[source] = uses.get(source, 0) + 1
        before_s = self.seconds
        now = peak = 0
        present: set[int] = set()
        staying: list[int] = []
        for op in ops:
            self.seconds += index.seconds[op]
            made = index.made[op]
            now += sum([index.n_bytes[v] for v in made])
            peak = max(peak, now + index.temps[op])
            for value in made:
                if self._stays(value):
                    staying.append(value)
                elif value in uses:
                    present.add(value)
                else:
                    now -= index.n_bytes[value]
            for source in index.sources[op]:
                uses[source] -= 1
                if not uses[source] and source in present:
                    present.remove(source)
                    now -= index.n_bytes[source]
        self.bumps.append((tick, peak))
        self.replays.append((tick, self.seconds - before_s, ops))
        self._leave(staying, tick)

    def _stays(self, value: int) -> bool:
        if not self.stays[value] or not self.refs.get(value) or value in self.back or value not in self.handles:
            return False
        return self.handles[value] > 0 or not self.index.saved[value]

    def _leave(self, staying: list[int], tick: int) -> None:
        """Values that stay are live from now on; release the calls that produced them."""
        for value in staying:
            self.back[value] = self.left[tick, value] = tick
        for value in staying:
            self._unlink(self.index.op_of[value], tick)

    def _unlink(self, op: int, tick: int) -> None:
        self.linked[op] -= 1
        if not self.linked[op]:
            self.unref(list(self.index.sources[op]), tick)

    def unref(self, pending: list[int], tick: int) -> None:
        """One holder of each value lets go; values without a holder are freed, with the calls that could make them."""
        index, refs, linked = self.index, self.refs, self.linked
        while pending:
            value = pending.pop()
            refs[value] -= 1
            if refs[value]:
                continue
            if value not in self.handles:
                self.needs[value] = tick
            elif value in self.back:
                if tick > self.back[value]:
                    self.left[self.back[value], value] = tick
                    self.intervals.append((self.back[value] + 1, tick, index.n_bytes[value]))
            else:
                op = index.op_of[value]
                linked[op] -= 1
                if not linked[op]:
                    pending.extend(index.sources[op])
