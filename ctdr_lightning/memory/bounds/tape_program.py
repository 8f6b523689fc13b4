"""The staged program with rules of the tape: it excludes solutions of Checkmate's program that no plan can carry out.

Every rule below holds for every plan that keeps and recomputes, as the simulator plays it, so that the program still
bounds all plans. In the arguments a plan gives each droppable saved value v one of three actions for the whole step:
it is kept, made again once (it stays from its first replay on), or made again at each use (it never stays). ``each[v]``
is 1 for the third. *In use* is v at a tick if that lies after an unpack of v and no later than the release of its save.

Stays. Kept or made once, v is there from some tick on until its last release, as autograd's handles hold it; made at
    each use, it is there in use alone. So at the ticks where it is not in use, ``present`` does not fall, and is 0 with
    ``each``.
Made once. A run of the op that makes v leaves v behind until its last release, but with ``each``. So
    ``runs[k] <= each + present[k + 1]``. With ``each``, every stage that asks for v runs its op.
Fits. Values that are live under every plan and values in use leave some room at a tick. A value that is larger than
this room
    is not there.
Replays. Where a stage asks for one value alone, all its runs are one replay, at that unpack's tick u. While an op of it
    runs, these are live: the values live at u under every plan; the op's outputs, its workspace and its inputs;
    saved values that are there from the stage's tick to beyond u, by the first rule; saved values that are there at the
    next tick and whose ops come before it, as they were there at u or were made before it in the same replay and stay.

Complexity: three rows a variable for the first two rules, and one row a run for the last, as long as the values that
are saved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ctdr_lightning.memory.bounds.staged_program import StagedProgram
from ctdr_lightning.memory.simulator.actions import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action, Recompute


@dataclass
class TapeProgram(StagedProgram):
    """The staged program of a trace with the rules of the tape.

    Attributes:
        each: For each value the variable that says whether it is made again at each use.
    """

    each: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        saved = [v for v in self.trace.saved if v in self.trace.droppable]
        self._released = {v: max(s.released for s in self.trace.values[v].saves) for v in saved}
        self._steady = {v for v in saved if self.trace.values[v].overwritten_at > self._released[v]}
        self._asks = sorted(t for v in saved for s in self.trace.values[v].saves for t in s.unpacked)
        self._stages: dict[int, list[int]] = {}
        for stage, value in sorted(self.present):
            self._stages.setdefault(value, []).append(stage)
        for value in sorted(self._steady.intersection(self._stages)):
            self._stays(value)
            self._made_once(value)
        self._fits()
        for stage in range(len(self.ticks)):
            self._replays(stage)

    def actions_of(self, numbers: np.ndarray, threshold: float) -> dict[int, Action]:
        """Whole actions from a solution's shares, which also tell kept values from those recomputed at each use."""
        actions = super().actions_of(numbers, threshold)
        for value, each in self.each.items():
            if isinstance(actions.get(value), Recompute):
                idle = self._idle(value)
                kept = bool(idle) and numbers[idle[0]] > threshold
                actions[value] = KEEP if kept else RECOMPUTE_EACH if numbers[each] > threshold else RECOMPUTE
        return actions

    def _in_use(self, stage: int, value: int) -> bool:
        tick = self.ticks[stage]
        saves = self.trace.values[value].saves
        return any(s.unpacked and min(s.unpacked) < tick <= s.released for s in saves)

    def _awaited(self, value: int) -> list[int]:
        """Stages at whose tick autograd still holds a value, and in which it has a variable."""
        return [stage for stage in self._stages[value] if self.ticks[stage] <= self._released[value]]

    def _idle(self, value: int) -> list[int]:
        """Variables of the ticks at which a value is awaited and not in use."""
        return [self.present[stage, value] for stage in self._awaited(value) if not self._in_use(stage, value)]

    def _stays(self, value: int) -> None:
        each = self.each[value] = self.program.variable(whole=True)
        idle = self._idle(value)
        for here in idle:
            self.program.at_most([(here, 1.0), (each, 1.0)], 1.0)
        for here, later in pairwise(idle):
            self.program.at_most([(here, 1.0), (later, -1.0)], 0.0)

    def _made_once(self, value: int) -> None:
        op, each = self.trace.values[value].op, self.each[value]
        for stage in self._awaited(value):
            if (run := self.runs.get((stage - 1, op))) is not None:
                self.program.at_most([(run, 1.0), (each, -1.0), (self.present[stage, value], -1.0)], 0.0)
        asked = [t for s in self.trace.values[value].saves for t in s.unpacked if t > self.lives.available[value]]
        for stage in {bisect_left(self.ticks, t) - 1 for t in asked}:
            if (run := self.runs.get((stage, op))) is not None:
                self.program.at_most([(each, 1.0), (run, -1.0)], 0.0)

    def _fits(self) -> None:
        """Forbid values that are larger than the room left at a tick under every plan."""
        trace = self.trace
        in_use = [{trace.values[v].storage for v in forced} for forced in self._forced]
        room = [self._room(stage, places) for stage, places in enumerate(in_use)]
        for (stage, value), variable in self.present.items():
            place = trace.values[value].storage
            apart = value in trace.unholdable or self._is_apart(value, self.ticks[stage])
            if apart and place not in in_use[stage] and trace.storages[place].n_bytes > room[stage]:
                self.program.forbid(variable)

    def _room(self, stage: int, in_use: set[int]) -> int:
        tick = self.ticks[stage]
        taken = sum(self.trace.storages[place].n_bytes for place in in_use if self.lives.ends[place] < tick)
        return self.budget_bytes - int(self.lives.bytes_at[tick]) - taken

    def _replays(self, stage: int) -> None:
        """Limit the bytes of every run in a stage that asks for one value."""
        ends = self.ticks[stage + 1] if stage + 1 < len(self.ticks) else self.trace.n_ticks
        asks = self._asks[bisect_right(self._asks, self.ticks[stage]) : bisect_left(self._asks, ends)]
        if len(asks) != 1:
            return
        through = {v: self.present[stage, v] for v in self._steady if self._is_through(stage, v, asks[0])}
        after = {
            v: self.present[stage + 1, v]
            for v in self._steady - self._forced[stage]
            if (stage + 1, v) in self.present and self._is_apart(v, self.ticks[stage])
        }
        for (at, op), run in list(self.runs.items()):
            if at == stage:
                there = {v: x for v, x in after.items() if self.trace.values[v].op < op}
                self._limit_run(op, run, asks[0], through, through | there)

    def _is_apart(self, value: int, tick: int) -> bool:
        """Whether the bytes of a live value are not among those that are live under every plan."""
        return self.lives.ends[self.trace.values[value].storage] < tick

    def _is_through(self, stage: int, value: int, asked: int) -> bool:
        """Whether a value that is there at a stage's tick is so at an unpack after it, too."""
        if (stage, value) not in self.present or not self._is_apart(value, self.ticks[stage]):
            return False
        if not self._in_use(stage, value):
            return self._released[value] >= asked
        since = self.lives.available[value]
        saves = [s for s in self.trace.values[value].saves if s.released >= asked]
        return any(since < t < self.ticks[stage] for s in saves for t in s.unpacked)

    def _limit_run(self, op: int, run: int, asked: int, through: dict[int, int], there: dict[int, int]) -> None:
        trace, unit = self.trace, max(self.budget_bytes, 1)
        room = self.budget_bytes - int(self.lives.bytes_at[asked])
        made = {v for v in trace.ops[op].outputs if v >= 0 and trace.values[v].op == op}
        read = {v for v in trace.ops[op].inputs if v in trace.droppable and self._is_made_again(v, asked)} - made
        of_run = trace.ops[op].temp_bytes + sum(trace.value_bytes(v) for v in made)
        terms: dict[int, tuple[int, int]] = {}  # by storage: a variable, and bytes
        for value in sorted(there.keys() - made - read):
            terms[trace.values[value].storage] = (there[value], trace.value_bytes(value))
        for value in read:
            terms.pop(trace.values[value].storage, None)
            if value not in through:
                of_run += trace.value_bytes(value)
            else:
                held = self._any_of([through[value], run])
                terms[trace.values[value].storage] = (held, trace.value_bytes(value))
        if of_run + sum(n_bytes for _, n_bytes in terms.values()) > room:
            row = [(variable, n_bytes / unit) for variable, n_bytes in terms.values()]
            self.program.at_most([*row, (run, of_run / unit)], room / unit)

    def _is_made_again(self, value: int, asked: int) -> bool:
        """Whether a value that a replay reads takes bytes in addition to those that are live under every plan."""
        if self.lives.available[value] >= asked:
            return False
        return value in self.trace.unholdable or self._is_apart(value, asked)
