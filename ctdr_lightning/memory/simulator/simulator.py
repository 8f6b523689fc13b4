"""Trace and plan to a timeline: bytes over time and seconds. The only referee between policies.

The timeline is the plain one, minus the bytes of dropped values, plus the effects of the groups that they form (see
``effect``). ``Simulator`` keeps all of it in place, so that a search may try one action at a time for the price of one
group.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ctdr_lightning.memory.simulator.actions import (
    Action,
    Actions,
    Away,
    Compress,
    Offload,
    Recompute,
    action_of,
    keeps_sign_alone,
)
from ctdr_lightning.memory.simulator.away import AwayEffect, away_effect, link_to
from ctdr_lightning.memory.simulator.effect import Effect, effect_of
from ctdr_lightning.memory.simulator.groups import Flags, Group, Groups
from ctdr_lightning.memory.simulator.journal import Journal, Outcome
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.simulator.timeline import Segments, Timeline, segments_of
from ctdr_lightning.memory.simulator.transfers import Lanes, Transfers, Trip, tick_seconds
from ctdr_lightning.memory.traces.trace import Trace

# Effects of groups that are remembered: a search tries the same few changes over and over. Not tuned.
MEMO_SIZE = 10_000
# A change without any group takes as long as ten values in groups: attaching, settling, taking back.
WORK_OF_A_CHANGE = 10
# A value's way to another place and back took 10 to 20 us, and so did the clock without any.
WORK_OF_A_TRIP = 2


class Simulator:
    """The timeline of a trace under changing actions.

    Args:
        step: The step; prepared where several simulators share it.
        actions: Actions to start from; values without one keep their default.
    """

    def __init__(self, step: Trace | Prepared, actions: Actions | None = None) -> None:
        step = prepared(step)
        self.trace = trace = step.trace
        self.index = step.index
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
        self._away: dict[int, Away] = {}
        self._parts: dict[int, AwayEffect] = {}
        self._users: dict[str, int] = {}
        self._lanes: Lanes | None = None
        self._plain_s = trace.seconds
        self._recompute_s = 0.0
        self._ends = list(step.plain_ends)
        self._bytes = step.plain_bytes_at.copy()
        self._journal = Journal({}, 0.0)
        if actions:
            self.change(actions)

    @property
    def seconds(self) -> float:
        """Time of the present step; with transfers, after they were played."""
        return self._plain_s + self._recompute_s + self._waits_s()

    @property
    def recompute_seconds(self) -> float:
        """Time of the present replays and codecs."""
        return self._recompute_s

    @property
    def peak_bytes(self) -> int:
        """Peak of the present step."""
        return int(self._bytes.max(initial=self.trace.resident_bytes))

    @property
    def work(self) -> int:
        """Amount of simulation so far: a measure of time that is the same on every machine.

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

    def trial(self, actions: Actions) -> Outcome:
        """Outcome of a change, without making it; a change before it can no longer be undone.

        Waits for transfers count where the change takes one away; those of one more are left to who settles its ticks.
        """
        moved = any(isinstance(self._away.get(v), Offload) for v in actions)
        waits_s, lanes = self._waits_s() if moved else 0.0, self._lanes
        self._alter(actions)
        seconds = self._recompute_s - self._journal.seconds
        if waits_s:
            seconds += self._waits_s() - waits_s
        found = Outcome(seconds, segments_of(self._journal.steps))
        self._revert()
        self._lanes = lanes
        return found

    def timeline(self) -> Timeline:
        """A picture of the present step."""
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
            self.transfers(),
        )

    def effects(self) -> tuple[list[Effect], list[AwayEffect]]:
        """The effect of each present group of dropped values, and of each value that is put away."""
        return list(self._effects.values()), list(self._parts.values())

    def transfers(self) -> Transfers:
        """When each value that is put away elsewhere moves, and how long the step waits for it."""
        return self._played_lanes().transfers()

    def _played_lanes(self) -> Lanes:
        if self._lanes is None:
            trips = [
                Trip(value, action, self._parts[value].needed)
                for value, action in self._away.items()
                if isinstance(action, Offload) and value in self._parts
            ]
            self._lanes = Lanes(self.trace, trips, self._extra_seconds())
            self._played += WORK_OF_A_TRIP * (1 + len(trips))
        return self._lanes

    def _extra_seconds(self) -> list[tuple[int, float]]:
        """``(tick, seconds)`` of replays, codecs and the transfers' share of the step's compute time."""
        found = [(tick, s) for e in self._effects.values() for tick, s, _ in e.replays]
        for value, parts in self._parts.items():
            found.append((self.trace.ops[self.index.op_of[value]].tick, parts.seconds - parts.decode_s))
            if parts.needed is not None:
                found.append((parts.needed, parts.decode_s))
        return found

    def base_starts_s(self) -> np.ndarray:
        """When each tick begins if no transfer is waited for; shape ``(n_ticks + 1,)``."""
        return np.concatenate([[0.0], np.cumsum(tick_seconds(self.trace, self._extra_seconds()))])

    def _waits_s(self) -> float:
        if not any(isinstance(action, Offload) for action in self._away.values()):
            return 0.0
        return self._played_lanes().waits_s

    def _alter(self, actions: Actions) -> None:
        groups = self._groups
        journal = self._journal = Journal({v: self.actions.get(v) for v in actions}, self._recompute_s)
        self.actions.update(actions)
        for value in actions:
            old = (groups.drops[value], groups.stays[value])
            new = self._flags(value)
            if new != old:
                journal.flags[value] = old
                groups.drops[value], groups.stays[value] = new
            self._put_away(value)
        if journal.flags:
            self._regroup()
        if journal.away:
            self._settle({self.trace.values[v].storage for v in journal.away})
        self._lanes = None

    def _revert(self) -> None:
        journal, self._journal = self._journal, Journal({}, self._recompute_s)
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
        for value, action in journal.away.items():
            for holder, sign in ((self._away.get(value), -1), (action, 1)):
                if isinstance(holder, Offload):
                    self._users[holder.to] = self._users.get(holder.to, 0) + sign
            self._set_away(value, action)
        for value, parts in journal.parts.items():
            if parts is None:
                self._parts.pop(value, None)
            else:
                self._parts[value] = parts
        self._lanes = None
        self._recompute_s = journal.seconds

    def _put_away(self, value: int) -> None:
        """Note whether a value's action puts it away."""
        old, new = self._away.get(value), action_of(self.trace, self.actions, value)
        wanted = new if isinstance(new, (Offload, Compress)) else None
        if wanted == old:
            return
        self._journal.away[value] = old
        self._set_away(value, wanted)
        for action, sign in ((old, -1), (wanted, 1)):
            if isinstance(action, Offload):
                self._use_link(action.to, sign)

    def _set_away(self, value: int, action: Away | None) -> None:
        if action is None:
            self._away.pop(value, None)
        else:
            self._away[value] = action

    def _use_link(self, holder: str, sign: int) -> None:
        """A link's staging buffers are there all along as soon as one value uses it."""
        before = self._users.get(holder, 0)
        self._users[holder] = before + sign
        if (before > 0) != (before + sign > 0):
            self._step(0, self.trace.n_ticks - 1, sign * link_to(self.trace, holder).device_bytes)

    def needed(self, value: int) -> tuple[int | None, int]:
        """First tick at which a value that is away is read, and the last at which it may be."""
        alive_until = self.index.alive_until[value]
        ticks = [t for s in self.trace.values[value].saves for t in s.unpacked if t > alive_until]
        until = self.index.released[value]
        for index, last in self._needs[value].items():
            until = max(until, last)
            sources = self.index.sources
            ticks += [
                t for t, _, ops in self._effects[index].replays
                if t > alive_until and any(value in sources[op] for op in ops)
            ]  # fmt: skip
        return min(ticks, default=None), until

    def _settle_away(self, value: int) -> int | None:
        """Update the bytes held for a value that is away. Returns the last tick at which its own memory is held."""
        action, old = self._away.get(value), self._parts.get(value)
        if action is not None and keeps_sign_alone(action) and self._needs[value]:
            action = None  # a replay reads it: it is kept
        new = away_effect(self.trace, value, action, *self.needed(value)) if action is not None else None
        if new != old:
            self._journal.parts.setdefault(value, old)
            self._replace_parts(value, old, new)
        return None if new is None else new.gone

    def _replace_parts(self, value: int, old: AwayEffect | None, new: AwayEffect | None) -> None:
        for effect, sign in ((old, -1), (new, 1)):
            for first, last, n_bytes in effect.intervals if effect is not None else ():
                self._step(first, last, sign * n_bytes)
            self._recompute_s += sign * effect.seconds if effect is not None else 0.0
        if new is None:
            self._parts.pop(value, None)
        else:
            self._parts[value] = new

    def _flags(self, value: int) -> Flags:
        """Flags of a value: whether it is dropped, and whether a replay that passes it leaves it behind."""
        action = action_of(self.trace, self.actions, value)
        return (True, action.stays) if isinstance(action, Recompute) else (False, True)

    def _regroup(self) -> None:
        """Exchange the groups that the last change of flags concerns, and settle the storages that they hold."""
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
        """Note that so many more bytes are live from ``first`` to ``last``; notes that cancel out cost nothing more."""
        steps = self._journal.steps
        steps[first] = steps.get(first, 0) + n_bytes
        steps[last + 1] = steps.get(last + 1, 0) - n_bytes

    def _move(self, segments: Segments, sign: int) -> None:
        for first, end, n_bytes in segments:
            self._bytes[first:end] += sign * n_bytes

    def _settle(self, storages: Iterable[int]) -> None:
        """Update the ends of storages, which the program, autograd's handles and replays hold."""
        for index in storages:
            storage = self.trace.storages[index]
            if storage.born < 0:
                continue
            end = storage.end
            for value in self._on_storage[index]:
                gone = self._settle_away(value) if value in self._away or value in self._parts else None
                if gone is not None:
                    end = max(end, gone)
                    continue
                if self._kept[value]:
                    end = max(end, self.index.released[value])
                for tick in self._needs[value].values():
                    end = max(end, tick)
            old = self._ends[index]
            if end != old:
                self._journal.ends.append((index, old))
                self._ends[index] = end
                self._step(old + 1, end, storage.n_bytes)
