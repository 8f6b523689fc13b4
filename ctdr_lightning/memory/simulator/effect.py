"""What dropping a connected group of values does: when they come back, what the replays take, what they prolong.

Dropped values that no dropped value connects live and return independently of each other, so a plan's timeline is the
plain timeline plus a sum of such effects, and the change of one action changes one effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ctdr_lightning.basics.remembered import Remembered
from ctdr_lightning.memory.traces.trace import Trace

_UNPACK, _RELEASE = 0, 1


class Layout:
    """What playing a backward needs of a trace, as plain lists: it is played very often.

    It holds no reference to the trace, so that it can be remembered for as long as the trace lives.

    Attributes:
        n_ticks: Length of the time axis.
        seconds: For each op what it takes to run it once more.
        temps: For each op its workspace.
        sources: For each op the values that it reads.
        made: For each op the values that it makes (a view makes none).
        op_of: For each value its op; -1 for one from before the step.
        n_bytes: For each value the size of its allocation.
        alive_until: For each value the last tick at which the program itself still has it.
        saved: For each value whether autograd saves it.
        n_saves: For each value how many of autograd's handles hold it.
        released: For each value the last tick at which one does; -1 where none ever does.
        droppable: For each value whether it may be recomputed.
        near: For each droppable value the droppable values that share an op call with it.
        events: For each value when autograd asks for it and lets go of it.
    """

    def __init__(self, trace: Trace) -> None:
        self.n_ticks = trace.n_ticks
        self.seconds = [trace.replay_seconds(index) for index in range(len(trace.ops))]
        self.temps = [op.temp_bytes for op in trace.ops]
        self.sources = [op.inputs for op in trace.ops]
        self.op_of = [v.op for v in trace.values]
        self.made = [
            [v for v in dict.fromkeys(op.outputs) if v >= 0 and self.op_of[v] == i] for i, op in enumerate(trace.ops)
        ]
        self.n_bytes = [trace.storages[v.storage].n_bytes for v in trace.values]
        self.alive_until = [min(trace.storages[v.storage].end, v.lost - 1) for v in trace.values]
        self.saved = [bool(v.saves) for v in trace.values]
        self.released = [max((s.released for s in v.saves), default=-1) for v in trace.values]
        self.droppable = [v in trace.droppable for v in range(len(trace.values))]
        self.near = self._find_near(trace)
        self.n_saves = [len(v.saves) for v in trace.values]
        self.events = [
            tuple(
                event
                for s in v.saves
                for event in (*((t, _UNPACK, i, s.released) for t in s.unpacked), (s.released, _RELEASE, i, 0))
            )
            for i, v in enumerate(trace.values)
        ]

    def _find_near(self, trace: Trace) -> list[tuple[int, ...]]:
        near: list[set[int]] = [set() for _ in self.op_of]
        for op in trace.forward_ops:
            made = [v for v in self.made[op] if self.droppable[v]]
            called = {*made, *(v for v in self.sources[op] if self.droppable[v])} if made else set()
            for value in called:
                near[value] |= called if value in made else set(made)
        return [tuple(sorted(found - {value})) for value, found in enumerate(near)]


_LAYOUTS: Remembered[Layout] = Remembered()


def layout_of(trace: Trace) -> Layout:
    """The layout of a trace, prepared once."""
    return _LAYOUTS.get(trace, "layout", lambda: Layout(trace))


@dataclass(frozen=True, slots=True)
class Effect:
    """What one group does to the timeline.

    Attributes:
        intervals: ``(first tick, last tick, bytes)`` of each value that a replay leaves behind.
        bumps: ``(tick, bytes)`` of each replay's own peak.
        needs: For each value outside the group that the replays read, the last tick at which one does.
        seconds: Time of all replays.
    """

    intervals: list[tuple[int, int, int]]
    bumps: list[tuple[int, int]]
    needs: dict[int, int]
    seconds: float


def effect_of(layout: Layout, stays: Sequence[int], members: Collection[int]) -> Effect:
    """Play the backward for one group of dropped values.

    Args:
        layout: The recorded step.
        stays: For each value whether a replay that passes it leaves it behind for those who still want it.
        members: Value ids, connected through the ops that make them.

    Returns:
        The group's effect. Linear in the group's ops times the replays that it needs.
    """
    group = _Group(layout, stays, members)
    for tick, kind, value, released in sorted([event for v in members for event in layout.events[v]]):
        if kind == _UNPACK:
            group.unpack(value, tick, released)
        else:
            group.handles[value] -= 1
            group.unref([value], tick)
    return Effect(group.intervals, group.bumps, group.needs, group.seconds)


class _Group:
    """The state of a group while its part of the backward is played; mirrors the tape's reference counts.

    Attributes:
        handles: Live handles of autograd on each member.
        refs: Handles and op calls that hold each value.
        linked: Members for which each op call is still held.
        back: When each member that is there again was made.
    """

    __slots__ = (
        "back", "bumps", "handles", "intervals", "layout", "linked", "needs", "refs", "seconds", "stays",
    )  # fmt: skip

    def __init__(self, layout: Layout, stays: Sequence[int], members: Collection[int]) -> None:
        self.layout = layout
        self.stays = stays
        self.handles = {v: layout.n_saves[v] for v in members}
        self.refs = dict(self.handles)
        self.linked: dict[int, int] = {}
        for value in members:
            op = layout.op_of[value]
            self.linked[op] = self.linked.get(op, 0) + 1
        for op in self.linked:
            for source in layout.sources[op]:
                self.refs[source] = self.refs.get(source, 0) + 1
        self.back: dict[int, int] = {}
        self.needs: dict[int, int] = {}
        self.intervals: list[tuple[int, int, int]] = []
        self.bumps: list[tuple[int, int]] = []
        self.seconds = 0.0

    def unpack(self, value: int, tick: int, released: int) -> None:
        """Autograd asks for a member and keeps what it is given until ``released``."""
        if value in self.back or self.layout.alive_until[value] >= tick:
            return
        self._replay(self._missing_ops(value, tick), value, tick)
        if value not in self.back and released > tick:
            self.intervals.append((tick + 1, released, self.layout.n_bytes[value]))

    def _missing_ops(self, target: int, tick: int) -> list[int]:
        layout, handles, back = self.layout, self.handles, self.back
        found: set[int] = set()
        stack = [target]
        while stack:
            value = stack.pop()
            if value in handles and value not in back and layout.alive_until[value] < tick:
                op = layout.op_of[value]
                if op not in found:
                    found.add(op)
                    stack.extend(layout.sources[op])
        return sorted(found)

    def _replay(self, ops: list[int], target: int, tick: int) -> None:
        layout = self.layout
        uses = {target: 1}
        for op in ops:
            for source in layout.sources[op]:
                uses[source] = uses.get(source, 0) + 1
        now = peak = 0
        present: set[int] = set()
        staying: list[int] = []
        for op in ops:
            self.seconds += layout.seconds[op]
            made = layout.made[op]
            now += sum([layout.n_bytes[v] for v in made])
            peak = max(peak, now + layout.temps[op])
            for value in made:
                if self._stays(value):
                    staying.append(value)
                elif value in uses:
                    present.add(value)
                else:
                    now -= layout.n_bytes[value]
            for source in layout.sources[op]:
                uses[source] -= 1
                if not uses[source] and source in present:
                    present.remove(source)
                    now -= layout.n_bytes[source]
        self.bumps.append((tick, peak))
        self._leave(staying, tick)

    def _stays(self, value: int) -> bool:
        if not self.stays[value] or not self.refs.get(value) or value in self.back or value not in self.handles:
            return False
        return self.handles[value] > 0 or not self.layout.saved[value]

    def _leave(self, staying: list[int], tick: int) -> None:
        """What stays is there from now on, and the calls that made it are no longer held for its sake."""
        for value in staying:
            self.back[value] = tick
        for value in staying:
            self._unlink(self.layout.op_of[value], tick)

    def _unlink(self, op: int, tick: int) -> None:
        self.linked[op] -= 1
        if not self.linked[op]:
            self.unref(list(self.layout.sources[op]), tick)

    def unref(self, pending: list[int], tick: int) -> None:
        """One holder of each value lets go; what nobody holds is freed, and with it the call that could make it."""
        layout, refs, linked = self.layout, self.refs, self.linked
        while pending:
            value = pending.pop()
            refs[value] -= 1
            if refs[value]:
                continue
            if value not in self.handles:
                self.needs[value] = tick
            elif value in self.back:
                if tick > self.back[value]:
                    self.intervals.append((self.back[value] + 1, tick, layout.n_bytes[value]))
            else:
                op = layout.op_of[value]
                linked[op] -= 1
                if not linked[op]:
                    pending.extend(layout.sources[op])
