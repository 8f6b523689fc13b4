"""The staged program: which values are there at a few ticks of the step, and which ops run again between them.

It is Checkmate's formulation (Jain et al., MLSys 2020, arXiv 1910.02653) on the step as the tape runs it: every op runs
once in its own place, and between two ticks (a stage) ops may run again, which takes seconds but moves nothing.

    present[k, v]   value v is held at tick k                                   the paper's S
    runs[k, op]     op runs again in the stage that starts at tick k            the paper's R
    later[k, op]    op runs again in that stage or in any after it

A value that the backward asks for in a stage is live at its start or is recomputed in it; an op that runs again needs
its inputs in the same way; a value that is live at a tick was live at the tick before or was made since. ``later`` says
the same of all stages from k on, which is implied in whole numbers but makes the relaxation far tighter: one run cannot
be had in halves. Bytes are limited at the ticks alone, so that every plan of the tape is a solution: the program bounds
all plans from below, with few ticks as with many.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ctdr_lightning.memory.bounds.linear_program import LinearProgram
from ctdr_lightning.memory.simulator.actions import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.traces.trace import Trace


@dataclass(frozen=True)
class Lives:
    """Until when things are there whatever a plan does.

    Attributes:
        ends: For each storage, the last tick at which the program or a save that may not be dropped holds it.
        available: For each value, the last tick at which it can be read without a plan's doing.
        bytes_at: Bytes that are live at each tick under every plan, workspaces included.
    """

    ends: list[int]
    available: list[int]
    bytes_at: np.ndarray


def lives_of(step: Trace | Prepared) -> Lives:
    """The lives that no plan can change. Linear in the trace."""
    step = prepared(step)
    return step.once("lives", lambda: _lives(step.trace))


def _lives(trace: Trace) -> Lives:
    ends = [s.end for s in trace.storages]
    for value in trace.saved:
        if value not in trace.droppable:
            record = trace.values[value]
            ends[record.storage] = max(ends[record.storage], *(s.released for s in record.saves))
    steps = np.zeros(trace.n_ticks + 2, dtype=np.int64)
    for storage, end in zip(trace.storages, ends, strict=True):
        if storage.born >= 0:
            steps[storage.born] += storage.n_bytes
            steps[min(end, trace.n_ticks) + 1] -= storage.n_bytes
    bytes_at = np.cumsum(steps)[: trace.n_ticks] + trace.resident_bytes
    for op in trace.ops:
        bytes_at[op.tick] += op.temp_bytes
    available = [min(ends[v.storage], v.overwritten_at - 1) for v in trace.values]
    return Lives(ends, available, bytes_at)


def least_bytes_at(step: Trace | Prepared) -> np.ndarray:
    """Bytes at each tick that no plan goes below: the program's own tensors and its op's operands. Linear."""
    step = prepared(step)
    return step.once("least", lambda: _least(step.trace, lives_of(step)))


def _least(trace: Trace, lives: Lives) -> np.ndarray:
    spans: dict[int, list[tuple[int, int]]] = {}
    for value in trace.saved:
        place = trace.values[value].storage
        for save in trace.values[value].saves if value in trace.droppable else ():
            asked = [t for t in save.unpacked if t > lives.available[value]]
            if asked:
                spans.setdefault(place, []).append((max(min(asked), lives.ends[place]) + 1, save.released))
    steps = np.zeros(trace.n_ticks + 1, dtype=np.int64)
    for place, worked_on in spans.items():
        end = -1
        for first, last in sorted(worked_on):
            first, end = max(first, end + 1), max(end, last)
            if first <= end:
                steps[first] += trace.storages[place].n_bytes
                steps[end + 1] -= trace.storages[place].n_bytes
    return lives.bytes_at + np.cumsum(steps)[:-1]


@dataclass
class StagedProgram:
    """The program of a trace, and the meaning of its variables.

    Args:
        trace: The recorded step.
        ticks: Ticks of ops, rising: where bytes are limited and stages start.
        budget_bytes: Limit of the peak.
        lives: ``lives_of(trace)``.
        spare_bytes: Bytes to leave free at some of the ticks.
    """

    trace: Trace
    ticks: Sequence[int]
    budget_bytes: int
    lives: Lives
    spare_bytes: Mapping[int, int] = field(default_factory=dict)
    program: LinearProgram = field(default_factory=LinearProgram)
    present: dict[tuple[int, int], int] = field(default_factory=dict)
    runs: dict[tuple[int, int], int] = field(default_factory=dict)
    later: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._forced = [set[int]() for _ in self.ticks]
        self._todo: list[tuple[dict[tuple[int, int], int], int, int]] = []
        for value in self.trace.saved:
            if value in self.trace.droppable:
                self._force(value)
        for value in self.trace.saved:
            if value in self.trace.droppable:
                self._demand(value)
        for stage, values in enumerate(self._forced):
            for value in sorted(values):
                self._present(stage, value)
        while self._todo:
            kind, stage, index = self._todo.pop()
            if kind is self.present:
                self._persists(stage, index)
            elif stage >= 0:  # before the first tick, whatever a run needs may still be there
                self._needs_inputs(kind, stage, index)
        self._limit_bytes()

    def _force(self, value: int) -> None:
        """While the backward op that asked for a value works on it, it is there."""
        for save in self.trace.values[value].saves:
            asked = [t for t in save.unpacked if t > self.lives.available[value]]
            if asked:
                first, end = bisect_right(self.ticks, min(asked)), bisect_right(self.ticks, save.released)
                for stage in range(first, end):
                    self._forced[stage].add(value)

    def _demand(self, value: int) -> None:
        op = self.trace.values[value].op
        stages = {bisect_left(self.ticks, t) - 1 for s in self.trace.values[value].saves for t in s.unpacked}
        for stage in range(max(stages, default=-1) + 1):
            if self._given(stage, value):
                continue
            here = self._present(stage, value)
            self.program.at_most([(here, -1.0), (self._later(stage, op), -1.0)], -1.0)
            if stage in stages:
                self.program.at_most([(here, -1.0), (self._runs(stage, op), -1.0)], -1.0)

    def _given(self, stage: int, value: int) -> bool:
        """Whether a value is there at a tick without a plan's doing, or is yet to be made."""
        return self.trace.values[value].op < 0 or self.lives.available[value] >= self.ticks[stage]

    def _present(self, stage: int, value: int) -> int:
        key = (stage, value)
        if key not in self.present:
            self.present[key] = self.program.variable(fixed=value in self._forced[stage], whole=True)
            self._todo.append((self.present, *key))
        return self.present[key]

    def _runs(self, stage: int, op: int) -> int:
        key = (stage, op)
        if key not in self.runs:
            share = self.trace.replay_seconds(op) / (self.trace.seconds or 1.0)
            self.runs[key] = self.program.variable(share, whole=True)
            self._todo.append((self.runs, *key))
        return self.runs[key]

    def _later(self, stage: int, op: int) -> int:
        key = (stage, op)
        if key not in self.later:
            self.later[key] = self.program.variable()
            self._todo.append((self.later, *key))
            stages = range(stage, len(self.ticks))
            self.program.at_most([(self.later[key], 1.0), *((self._runs(s, op), -1.0) for s in stages)], 0.0)
        return self.later[key]

    def _needs_inputs(self, kind: dict[tuple[int, int], int], stage: int, op: int) -> None:
        again = self._runs if kind is self.runs else self._later
        for source in set(self.trace.ops[op].inputs):
            if not self._given(stage, source):
                terms = [(kind[stage, op], 1.0), (self._present(stage, source), -1.0)]
                if source in self.trace.droppable:
                    terms.append((again(stage, self.trace.values[source].op), -1.0))
                self.program.at_most(terms, 0.0)

    def _persists(self, stage: int, value: int) -> None:
        """A live value was live at the tick before or was made since; a value that is written over, only the latter."""
        terms = [(self.present[stage, value], 1.0)]
        written_over = value in self.trace.unholdable
        if not written_over and (not stage or self._given(stage - 1, value)):
            return
        if stage and not self._given(stage - 1, value):
            terms.append((self._present(stage - 1, value), -1.0))
        if value in self.trace.droppable:
            terms.append((self._runs(stage - 1, self.trace.values[value].op), -1.0))
        self.program.at_most(terms, 0.0)

    def _limit_bytes(self) -> None:
        """Bytes at each tick, as shares of the budget; values of one storage count once, recomputed ones separately."""
        unit = max(self.budget_bytes, 1)
        on_storage: dict[tuple[int, int], list[int]] = {}
        rows: list[list[tuple[int, float]]] = [[] for _ in self.ticks]
        for (stage, value), variable in self.present.items():
            place = self.trace.values[value].storage
            if value in self.trace.unholdable:
                rows[stage].append((variable, self.trace.storages[place].n_bytes / unit))
            elif self.lives.ends[place] < self.ticks[stage]:
                on_storage.setdefault((stage, place), []).append(variable)
        for (stage, place), variables in on_storage.items():
            held = variables[0] if len(variables) == 1 else self._any_of(variables)
            rows[stage].append((held, self.trace.storages[place].n_bytes / unit))
        for tick, row in zip(self.ticks, rows, strict=True):
            room = self.budget_bytes - int(self.lives.bytes_at[tick]) - self.spare_bytes.get(tick, 0)
            self.program.at_most(row, room / unit)

    def _any_of(self, variables: Sequence[int]) -> int:
        held = self.program.variable()
        for variable in variables:
            self.program.at_most([(variable, 1.0), (held, -1.0)], 0.0)
        return held

    def actions_of(self, numbers: np.ndarray, threshold: float) -> dict[int, Action]:
        """Whole actions from a solution's shares.

        Args:
            numbers: The solution, one number a variable.
            threshold: From which share on a value counts as held, and an op, from one less it, as run again.

        Returns:
            The actions with which the values of the solution are held and its ops run again.
        """
        trace = self.trace
        held = {key for key, variable in self.present.items() if numbers[variable] > threshold}
        again = Counter(op for (_, op), variable in self.runs.items() if numbers[variable] > 1 - threshold)
        readers = Counter(source for op in again for source in set(trace.ops[op].inputs))
        intervals: dict[int, list[int]] = {v: [] for op in again for v in trace.ops[op].outputs if v >= 0}
        for interval, value in sorted(self.present):
            intervals.setdefault(value, []).append(interval)
        actions: dict[int, Action] = {}
        for value, where in intervals.items():
            runs = again[trace.values[value].op]
            if not runs and where and (where[0], value) in held:
                actions[value] = KEEP
            elif trace.values[value].saves and where:
                actions[value] = RECOMPUTE_EACH if runs > 1 else RECOMPUTE
            elif runs == 1 and (readers[value] > 1 or any((interval, value) in held for interval in where)):
                actions[value] = RECOMPUTE
        return actions


def choose_ticks(trace: Trace, bytes_at: np.ndarray, budget_bytes: int, n_ticks: int) -> list[int]:
    """Choose the ticks at which to limit bytes: the forward's highest over the budget, and some of the backward.

    Args:
        trace: The recorded step.
        bytes_at: Bytes of the plain step at each tick.
        budget_bytes: Largest peak allowed.
        n_ticks: How many at most.
    """
    over = [op for op in trace.ops if bytes_at[op.tick] > budget_bytes]
    forward = [op.tick for op in over if not op.backward]
    backward = np.array([op.tick for op in over if op.backward], dtype=np.int64)
    found = {max(forward, key=lambda t: bytes_at[t])} if forward and (n_ticks > 1 or not len(backward)) else set()
    for part in np.array_split(backward, min(n_ticks - len(found), len(backward)) or 1):
        if len(part):
            found.add(int(part[np.argmax(bytes_at[part])]))
    return sorted(found)
