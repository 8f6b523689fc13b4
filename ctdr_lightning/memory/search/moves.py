"""The single changes that a search can make to a plan, and their outcomes, kept up to date.

A move gives one value another action. Its outcome (seconds, and the change of live bytes over time) is simulated once
and remembered until a move nearby is made. So each step of a search can weigh all moves at once, in a few array
operations, and simulates only the best of them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ctdr_lightning.memory.search.frontier import CHOICES, Others, action_for
from ctdr_lightning.memory.search.timetable import Timetable
from ctdr_lightning.memory.simulator.actions import Action, Actions, Offload
from ctdr_lightning.memory.simulator.journal import Outcome
from ctdr_lightning.memory.simulator.simulator import Simulator

# Stretches of the timeline that are remembered of a move, the largest: arrays of one width let all moves be weighed at
# once, and a move is simulated exactly before it is made. Not tuned.
N_SEGMENTS = 12
# Items that are estimated anew after a change nearby, the closest in time; the others keep older estimates. Not tuned.
N_NEAR = 12
# All values together that are left without moves hold less than this share of the plain bytes.
NEGLIGIBLE_SHARE = 0.005
# Work on exact estimates after one change; the items further off keep theirs, or are guessed. Where most of a net is
# one group (TreeLSTM under half its peak: 1,000 values) each estimate plays all of it: without a limit, going to a
# rounded plan took 2 million units of work, four times a whole search, and left TreeLSTM at 0.4 16 % above its bound.
REFRESH_WORK, LOAD_WORK = 6_000, 60_000
_KEEP, _EACH = 0, 2


class Moves:
    """A plan under change.

    Args:
        simulator: The plan to change; it is changed along.
        others: Further actions of some values: a codec, a link.

    Attributes:
        items: The values that have moves, in the order in which they are made. Values that hardly count even
            together have none, and keep their default.
        default: For each item the index of its default action in ``CHOICES``: saved values are kept.
        n_choices: Most actions that an item has: those of ``CHOICES`` and the most others of one.
        state: For each item the index of its present action in ``CHOICES``, or beyond them.
        seconds: For each move by how much it prolongs the step; move ``n_choices * i + c`` gives item ``i`` choice
            ``c``.
        usable: For each move whether it would change anything.
    """

    def __init__(self, simulator: Simulator, others: Others | None = None) -> None:
        self.simulator = simulator
        self._others = others or {}
        trace = simulator.trace
        values = sorted(trace.droppable.union(self._others))
        least = NEGLIGIBLE_SHARE * (simulator.peak_bytes - trace.resident_bytes) / max(len(values), 1)
        self.items = [v for v in values if trace.value_bytes(v) >= least]
        self.default = bytes(_KEEP if trace.values[v].saves else _EACH for v in self.items)
        self.state = bytearray(self.default)
        self._index = {value: i for i, value in enumerate(self.items)}
        self.n_choices = len(CHOICES) + max((len(found) for found in self._others.values()), default=0)
        links = sorted({a.to for found in self._others.values() for a in found if isinstance(a, Offload)})
        self._timetables = {to: Timetable(simulator, to) for to in links}
        self._allowed = [self._allowed_for(value) for value in self.items]
        n_moves = self.n_choices * len(self.items)
        self.seconds = np.zeros(n_moves)
        self.usable = np.zeros(n_moves, dtype=bool)
        self._first = np.zeros((n_moves, N_SEGMENTS), dtype=np.int64)
        self._end = np.zeros((n_moves, N_SEGMENTS), dtype=np.int64)
        self._level = np.zeros((n_moves, N_SEGMENTS), dtype=np.int64)
        self._refresh(range(len(self.items)))

    def _allowed_for(self, value: int) -> tuple[bool, ...]:
        """A flag per choice: values that are overwritten later cannot be held, random ones cannot be replayed."""
        trace = self.simulator.trace
        droppable = value in trace.droppable
        n_others = len(self._others.get(value, ()))
        besides = (n < n_others for n in range(self.n_choices - len(CHOICES)))
        return (value not in trace.unholdable, droppable, droppable, *besides)

    def weigh(self, where: np.ndarray) -> np.ndarray:
        """For each move the bytes that it adds, summed over some of the ticks.

        Args:
            where: Which ticks count, as booleans; shape ``(n_ticks,)``.
        """
        counts = np.zeros(len(where) + 1, dtype=np.int64)
        np.cumsum(where, out=counts[1:])
        return ((counts[self._end] - counts[self._first]) * self._level).sum(axis=1)

    def look(self, move: int) -> Outcome:
        """Simulate a move again."""
        item, choice = divmod(move, self.n_choices)
        action, delay_s = self._placed(item, choice)
        trial = self.simulator.trial({self.items[item]: action})
        trial = Outcome(trial.seconds + delay_s, trial.segments)
        segments = trial.segments
        if len(segments) > N_SEGMENTS:
            segments = sorted(segments, key=lambda s: -abs(s[2]) * (s[1] - s[0]))[:N_SEGMENTS]
        self.seconds[move] = trial.seconds
        self.usable[move] = bool(segments)
        self._level[move] = 0
        for k, (first, end, level) in enumerate(segments):
            self._first[move, k], self._end[move, k], self._level[move, k] = first, end, level
        return trial

    def make(self, move: int) -> list[int]:
        """Make a move. Returns the items whose moves were simulated again: those that share an op call with it."""
        item, choice = divmod(move, self.n_choices)
        self.simulator.change({self.items[item]: self._placed(item, choice)[0]})
        self.state[item] = choice
        self._settle()
        self._guess(item)
        near = self._near([item])
        self._refresh(sorted(near, key=lambda i: abs(i - item)), REFRESH_WORK)
        return near

    def load(self, state: bytes) -> None:
        """Go to another plan."""
        changed = [i for i, choice in enumerate(state) if choice != self.state[i]]
        self.simulator.change({self.items[i]: self._action(i, state[i]) for i in changed})
        self.state[:] = state
        self._settle()
        for item in changed:
            self._guess(item)
        self._refresh(self._near(changed), LOAD_WORK)

    def state_of(self, actions: Actions) -> bytes:
        """A plan's state; actions of values without moves are left out."""
        return bytes(self._choice(i, actions.get(v)) for i, v in enumerate(self.items))

    def _choice(self, item: int, action: Action | None) -> int:
        choices = (*CHOICES, *self._others.get(self.items[item], ()))
        if isinstance(action, Offload) and action not in choices:
            action = Offload(action.to, action.codecs)
        wanted = choices.index(action) if action in choices else -1
        return wanted if wanted >= 0 and self.allows(item, wanted) else self.default[item]

    def _action(self, item: int, choice: int) -> Action:
        return action_for(self.items[item], choice, self._others)

    def _placed(self, item: int, choice: int) -> tuple[Action, float]:
        """A choice's action, its ticks where they find room on the lanes, and by how much that delays the step."""
        action = self._action(item, choice)
        if isinstance(action, Offload):
            return self._timetables[action.to].place(self.items[item], action)
        return action, 0.0

    def _settle(self) -> None:
        """Give everything that is moved its ticks, as the transfers of a plan share their lanes."""
        for timetable in self._timetables.values():
            chosen = {
                v: self._action(i, choice) for i, (v, choice) in enumerate(zip(self.items, self.state, strict=True))
            }
            ticks, now = timetable.settle(chosen), self.simulator.actions
            self.simulator.change({v: a for v, a in ticks.items() if now[v] != a})

    def allows(self, item: int, choice: int) -> bool:
        """Whether an item can be given an action."""
        return self._allowed[item][choice]

    def of(self, items: Iterable[int]) -> list[int]:
        """The moves of some items."""
        return [self.n_choices * i + choice for i in items for choice in range(self.n_choices)]

    def _refresh(self, items: Iterable[int], most_work: float = math.inf) -> None:
        """Simulate moves again, in the order of their items, until that took so much work."""
        start = self.simulator.work
        for item in items:
            if self.simulator.work - start > most_work:
                return
            for move in self.of([item]):
                choice = move % self.n_choices
                if choice == self.state[item] or not self.allows(item, choice):
                    self.usable[move] = False
                else:
                    self.look(move)

    def _guess(self, item: int) -> None:
        """Estimate an item's moves by itself: its own bytes while it waits, its own op's time.

        A move is simulated exactly before it is made, so that a guess costs time at most.
        """
        value, trace = self.items[item], self.simulator.trace
        if value in self._others:
            self._refresh([item])  # few, and played at once
            return
        record, index = trace.values[value], self.simulator.index
        asked = [t for s in record.saves for t in s.unpacked]
        seconds, n_bytes = index.seconds[index.op_of[value]], index.n_bytes[value]
        begin = index.alive_until[value] + 1
        waits = (begin, max(min(asked, default=begin), begin))
        between = (waits[1], max(max(asked, default=begin), waits[1]))
        now = self.state[item]
        for move in self.of([item]):
            choice = move % self.n_choices
            self.usable[move] = bool(asked) and choice != now and self.allows(item, choice)
            sign = int(choice == _KEEP) - int(now == _KEEP)
            stays = int(choice != _EACH) - int(now != _EACH)
            self.seconds[move] = -seconds * (sign or stays)
            self._level[move] = 0
            for k, ((first, end), level) in enumerate(((waits, sign), (between, stays))):
                self._first[move, k], self._end[move, k], self._level[move, k] = first, end, level * n_bytes

    def _near(self, items: Iterable[int]) -> list[int]:
        """Items that share an op call or a neighbour with one of these; of many the closest in time."""
        near = self.simulator.index.near
        found: set[int] = set()
        for item in items:
            value = self.items[item]
            reached = {value, *near[value]}.union(*(near[v] for v in near[value]))
            around = [self._index[v] for v in reached if v in self._index]
            found.update(sorted(around, key=lambda i: (abs(i - item), i))[:N_NEAR])
        return sorted(found)
