"""Trace and plan to a timeline: bytes over time and seconds. The only referee between policies.

The timeline is the plain one, minus what dropped values free, plus the effects of the groups that they form (see
``effects``). ``Simulator`` keeps all of it in place, so that a search may try one action at a time for the price of one
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ctdr_lightning.memory.plans.actions import Action, Actions, Recompute, action_of
from ctdr_lightning.memory.simulator.effect import Effect, effect_of
from ctdr_lightning.memory.simulator.groups import Flags, Group, Groups
from ctdr_lightning.memory.simulator.timeline import Segments, Timeline, segments_of
from ctdr_lightning.memory.simulator.trace_index import index_of
from ctdr_lightning.memory.traces.trace import Trace

MEMO_SIZE = 10_000
# A change without any group takes as long as ten values in groups: attaching, settling, taking back.
WORK_OF_A_CHANGE = 10


@dataclass(frozen=True, slots=True)
class Trial:
    """What a change of actions would do.

    Attributes:
        seconds: By how much the step would take longer.
        segments: ``(first tick, tick after the last, bytes)``: how many more bytes would be live.
    """

    seconds: float
    segments: Segments


@dataclass(slots=True)
class _Journal:
    """What one change did, to take it back."""

    actions: dict[int, Action | None]
    seconds: float
    flags: dict[int, Flags] = field(default_factory=dict)
    removed: dict[int, tuple[Group, Effect]] = field(default_factory=dict)
    inserted: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)


class Simulator:
    """The timeline of a trace under changing actions.

    Args:
        trace: The step.
        actions: What to start from; nothing is dropped where it says nothing.
    """

    def __init__(self, trace: Trace, actions: Actions | None = None) -> None:
        self.trace = trace
        self.index = index_of(trace)
        self.actions: dict[int, Action] = {}
        self._groups = Groups(self.index)
        self._effects: dict[int, Effect] = {}
        self._n_groups = 0
        self._played = 0
        self._memo: dict[tuple[Group, tuple[int, ...]], Effect] = {}
        self._kept = list(self.index.saved)
        self._needs: list[dict[int, int]] = [{} for _ in trace.values]
        self._on_storage: dict[int, list[int]] = {}
        for value, record in enumerate(trace.values):
            self._on_storage.setdefault(record.storage, []).append(value)
        self._plain_s = trace.seconds
        self._recompute_s = 0.0
        self._ends = [s.end for s in trace.storages]
        for value in trace.saved:
            place = trace.values[value].storage
            self._ends[place] = max(self._ends[place], self.index.released[value])
        self._bytes = self._plain_bytes()
        self._journal = _Journal({}, 0.0)
        if actions:
            self.change(actions)

    def _plain_bytes(self) -> np.ndarray:
        n = self.trace.n_ticks
        delta = np.zeros(n + 2, dtype=np.int64)
        for storage, end in zip(self.trace.storages, self._ends, strict=True):
            if storage.born >= 0:
                delta[storage.born] += storage.n_bytes
                delta[min(end, n) + 1] -= storage.n_bytes
        live = np.cumsum(delta[:n]) + self.trace.resident_bytes
        for op in self.trace.ops:
            live[op.tick] += op.temp_bytes
        return live

    @property
    def seconds(self) -> float:
        """Time of the step as it stands."""
        return self._plain_s + self._recompute_s

    @property
    def recompute_seconds(self) -> float:
        """Time of the replays as they stand."""
        return self._recompute_s

    @property
    def peak_bytes(self) -> int:
        """Peak of the step as it stands."""
        return int(self._bytes.max(initial=self.trace.resident_bytes))

    @property
    def work(self) -> int:
        """How much was simulated so far: a measure of time that is the same on every machine.

        It counts changes, values looked at in their groups, and ops played; one unit took 5 to 10 us where tried.
        """
        return self._groups.work + self._played

    def bytes_at(self) -> np.ndarray:
        """Live bytes at each tick; a view, which changes with the simulator."""
        return self._bytes

    def change(self, actions: Actions) -> dict[int, Action]:
        """Set some values' actions and bring the timeline up to date.

        Args:
            actions: From value id to its new action; values that may not be recomputed stay kept.

        Returns:
            The actions that were in force before, to be given back to ``change``. ``undo`` is faster where nothing was
            changed since.
        """
        before = {v: action_of(self.trace, self.actions, v) for v in actions}
        self._alter(actions)
        self._move(segments_of(self._journal.steps), 1)
        return before

    def undo(self) -> None:
        """Take the last change back; once."""
        self._move(segments_of(self._journal.steps), -1)
        self._revert()

    def trial(self, actions: Actions) -> Trial:
        """What a change would do. Nothing is changed, but a change before it can no longer be undone."""
        self._alter(actions)
        found = Trial(self._recompute_s - self._journal.seconds, segments_of(self._journal.steps))
        self._revert()
        return found

    def timeline(self) -> Timeline:
        """A picture of the step as it stands."""
        effects = self._effects.values()
        return Timeline(
            self.trace,
            dict(self.actions),
            self._bytes.copy(),
            self.seconds,
            self.recompute_seconds,
            sum(len(e.bumps) for e in effects),
            np.array(self._ends, dtype=np.int64),
            tuple(i for e in effects for i in e.intervals),
        )

    def _alter(self, actions: Actions) -> None:
        groups = self._groups
        journal = self._journal = _Journal({v: self.actions.get(v) for v in actions}, self._recompute_s)
        self.actions.update(actions)
        for value in actions:
            old = (groups.drops[value], groups.stays[value])
            new = self._flags(value)
            if new != old:
                journal.flags[value] = old
                groups.drops[value], groups.stays[value] = new
        if journal.flags:
            self._regroup()

    def _revert(self) -> None:
        journal, self._journal = self._journal, _Journal({}, self._recompute_s)
        for value, action in journal.actions.items():
            if action is None:
                del self.actions[value]
            else:
                self.actions[value] = action
        for value, flags in journal.flags.items():
            self._groups.drops[value], self._groups.stays[value] = flags
        for index in journal.inserted:
            self._detach(index)
        for index, (group, effect) in journal.removed.items():
            self._attach(index, group, effect)
        for value in journal.kept:
            self._kept[value] = not self._kept[value]
        for storage, end in journal.ends:
            self._ends[storage] = end
        self._recompute_s = journal.seconds

    def _flags(self, value: int) -> Flags:
        """Whether a value is dropped, and whether a replay that passes it leaves it behind."""
        action = action_of(self.trace, self.actions, value)
        drops = isinstance(action, Recompute)
        return drops, not isinstance(action, Recompute) or action.stays

    def _regroup(self) -> None:
        """Exchange the groups that the last change of flags concerns, and settle what they hold."""
        journal, groups, saved = self._journal, self._groups, self.index.saved
        gone, made = groups.regroup(journal.flags)
        self._played += WORK_OF_A_CHANGE
        touched = set(journal.flags).union(*made, *(groups.members[index] for index in gone))
        stale: set[int] = set()
        for index in gone:
            effect = self._effects[index]
            journal.removed[index] = (groups.members[index], effect)
            self._detach(index)
            self._shift(effect, -1)
            stale.update(effect.needs)
        for group in made:
            effect = self._effect(group)
            index, self._n_groups = self._n_groups, self._n_groups + 1
            self._attach(index, group, effect)
            journal.inserted.append(index)
            self._shift(effect, 1)
            stale.update(effect.needs)
        for value in touched:
            if saved[value] and self._kept[value] != (groups.of[value] < 0):
                self._kept[value] = not self._kept[value]
                journal.kept.append(value)
                stale.add(value)
        self._settle({self.trace.values[v].storage for v in stale})

    def _attach(self, index: int, group: Group, effect: Effect) -> None:
        self._groups.attach(index, group)
        self._effects[index] = effect
        for value, tick in effect.needs.items():
            self._needs[value][index] = tick

    def _detach(self, index: int) -> None:
        self._groups.detach(index)
        for value in self._effects.pop(index).needs:
            del self._needs[value][index]

    def _effect(self, group: Group) -> Effect:
        stays, saved = self._groups.stays, self.index.saved
        key = (group, tuple(sorted([v for v in group if stays[v] != saved[v]])))
        found = self._memo.get(key)
        if found is None:
            if len(self._memo) >= MEMO_SIZE:
                self._memo.clear()
            found = self._memo[key] = effect_of(self.index, stays, group)
            self._played += found.work
        return found

    def _shift(self, effect: Effect, sign: int) -> None:
        for first, last, n_bytes in effect.intervals:
            self._step(first, last, sign * n_bytes)
        for tick, n_bytes in effect.bumps:
            self._step(tick, tick, sign * n_bytes)
        self._recompute_s += sign * effect.seconds

    def _step(self, first: int, last: int, n_bytes: int) -> None:
        """Note that so many more bytes are live from ``first`` to ``last``; what cancels out costs nothing more."""
        steps = self._journal.steps
        steps[first] = steps.get(first, 0) + n_bytes
        steps[last + 1] = steps.get(last + 1, 0) - n_bytes

    def _move(self, segments: Segments, sign: int) -> None:
        for first, end, n_bytes in segments:
            self._bytes[first:end] += sign * n_bytes

    def _settle(self, storages: Iterable[int]) -> None:
        """Bring the ends of storages up to date: what the program, autograd's handles and the replays hold."""
        for index in storages:
            storage = self.trace.storages[index]
            if storage.born < 0:
                continue
            end = storage.end
            for value in self._on_storage[index]:
                if self._kept[value]:
                    end = max(end, self.index.released[value])
                for tick in self._needs[value].values():
                    end = max(end, tick)
            old = self._ends[index]
            if end != old:
                self._journal.ends.append((index, old))
                self._ends[index] = end
                self._step(old + 1, end, storage.n_bytes)


class HasActions(Protocol):
    """A plan, as far as the simulator looks at it."""

    @property
    def actions(self) -> Actions:
        """From value id to action."""
        ...


def simulate(trace: Trace, plan: HasActions | Actions | None = None) -> Timeline:
    """Predict a step under a plan.

    Args:
        trace: The recorded step.
        plan: A plan, or actions by value id; None for the plain step.

    Returns:
        The timeline: ``peak_bytes``, ``seconds``, ``recompute_seconds``, the bytes at each tick.
    """
    actions = plan if plan is None or isinstance(plan, Mapping) else plan.actions
    return Simulator(trace, actions).timeline()
