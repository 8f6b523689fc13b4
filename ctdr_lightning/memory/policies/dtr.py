"""Dynamic tensor rematerialization, projected: Kirisame et al., "Dynamic Tensor Rematerialization".

ICLR 2021, arXiv 2006.09616. The online policy itself is ``online``; this is its static projection, a plan made of the
decisions that it would take on the trace.

Reproduced: whenever the live bytes exceed the budget, the tensor with the least h = cost / (bytes * staleness) is
    evicted, where cost is its own op's and that of its evicted neighbourhood, kept by union-find (h^eq); tensors under
    1 % of the mean size are ignored.
Modelled: time is counted in ticks of the trace; a tensor that is evicted before its first use in the backward is
    recomputed, and one that is evicted again between two uses is recomputed for each use. As a plan cannot evict under
    pressure, the budget that the decisions are taken under is lowered until the plan's own peak fits.
Left out: sampling of candidates, as nothing waits for the decisions here.

Complexity O(n) for each eviction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ctdr_lightning.memory.plans.actions import RECOMPUTE, RECOMPUTE_EACH, Action, Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.evicted import SMALL_SHARE, EvictedSet
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline

TIGHTER = 0.93
PATIENCE = 3


@POLICIES.register("dtr")
def dtr(step: Prepared, budget: Budget) -> Timeline:
    """What the online policy would evict under the budget.

    Raises:
        InfeasibleBudgetError: When the plan exceeds the budget however early the policy starts to evict.
    """
    return choose(step, _projections(step, budget), budget, "dtr")


def _projections(step: Prepared, budget: Budget) -> Iterator[Timeline]:
    """Projections for tighter and tighter budgets, up to the first that fits or while the peak goes down."""
    resident_bytes, least = step.trace.resident_bytes, step.plain_peak_bytes
    room: float = (least if budget.peak_bytes is None else budget.peak_bytes) - resident_bytes
    in_vain = 0
    while in_vain < PATIENCE:
        timeline = judge(step, Projection(step, resident_bytes + int(room)).run())
        yield timeline
        peak = timeline.peak_bytes
        if budget.peak_bytes is not None and peak <= budget.peak_bytes:
            return
        in_vain = 0 if peak < least else in_vain + 1
        least, room = min(peak, least), room * TIGHTER


class Projection:
    """A step under the online policy, played on a trace.

    Args:
        step: The recorded step.
        budget_bytes: When to evict.
    """

    def __init__(self, step: Prepared, budget_bytes: int) -> None:
        index = self._index = step.index
        trace = self._trace = step.trace
        self._budget_bytes = budget_bytes
        self._values = [v for v in trace.saved if index.droppable[v]]
        self._bytes = {v: index.n_bytes[v] for v in self._values}
        self._others = self._without(step.plain_bytes_at)
        self._last: dict[int, int] = {}
        self._here: set[int] = set()
        self._now = 0
        self._evicted: dict[int, EvictedSet] = {}
        self._again: dict[int, Action] = {}

    def run(self) -> Actions:
        """Play the step; returns the actions that amount to what was evicted."""
        events = self._events()
        for tick in range(self._trace.n_ticks):
            for kind, value in events[tick]:
                self._happen(kind, value, tick)
            self._make_room(tick)
        return dict(self._again)

    def _without(self, plain: np.ndarray) -> np.ndarray:
        """Live bytes besides the values that can be evicted."""
        steps = np.zeros(len(plain) + 2, dtype=np.int64)
        for value in self._values:
            steps[self._trace.ops[self._index.op_of[value]].tick] += self._bytes[value]
            steps[self._end(value) + 1] -= self._bytes[value]
        return plain - np.cumsum(steps)[: len(plain)]

    def _end(self, value: int) -> int:
        return min(max(self._index.released[value], self._index.alive_until[value]), self._trace.n_ticks)

    def _events(self) -> dict[int, list[tuple[str, int]]]:
        """What happens to values at each tick."""
        events: dict[int, list[tuple[str, int]]] = defaultdict(list)
        index = self._index
        for op in self._trace.forward_ops:
            tick = self._trace.ops[op].tick
            events[tick] += [("use", v) for v in index.sources[op]]
            events[tick] += [("make", v) for v in index.made[op] if index.droppable[v]]
        for value, droppable in enumerate(index.droppable):
            if droppable and not index.saved[value]:
                events[index.alive_until[value] + 1].append(("die", value))
        for value in self._values:
            asked = [(t, "ask") for save in self._trace.values[value].saves for t in save.unpacked]
            for tick, kind in (*asked, (self._end(value) + 1, "end")):
                events[tick].append((kind, value))
        return events

    def _happen(self, kind: str, value: int, tick: int) -> None:
        self._now += 1
        self._last[value] = self._now
        if kind == "make" and value in self._bytes:
            self._come(value)
        elif kind == "die":
            self._leave(value)
        elif kind == "ask":
            self._fetch(value, tick)
        elif kind == "end":
            self._here.discard(value)
            self._evicted.pop(value, None)
            self._bytes.pop(value, None)

    def _come(self, value: int) -> None:
        self._here.add(value)
        self._evicted.pop(value, None)

    def _leave(self, value: int) -> None:
        """A value is evicted, or an unsaved one dies: its cost joins that of its evicted neighbourhood."""
        cost = self._evicted[value] = EvictedSet(self._index.seconds[self._index.op_of[value]])
        for near in self._index.near[value]:
            if near in self._evicted:
                cost.join(self._evicted[near])

    def _fetch(self, value: int, tick: int) -> None:
        """A value is asked for: what is missing is made again, and what is awaited of it stays."""
        stack = [value] if value not in self._here else []
        seen: set[int] = set()
        while stack:
            current = stack.pop()
            there = current in self._here or self._index.alive_until[current] >= tick
            if current in seen or there or not self._index.droppable[current]:
                continue
            seen.add(current)
            stack.extend(self._index.sources[self._index.op_of[current]])
        for current in seen & self._bytes.keys():
            self._again.setdefault(current, RECOMPUTE)
            self._come(current)
            self._last[current] = self._now

    def _make_room(self, tick: int) -> None:
        live = int(self._others[tick]) + sum(self._bytes[v] for v in self._here)
        while live > self._budget_bytes:
            victim = self._choose(tick)
            if victim is None:
                return
            live -= self._bytes[victim]
            self._here.discard(victim)
            self._leave(victim)
            self._again[victim] = RECOMPUTE_EACH if victim in self._again else RECOMPUTE

    def _choose(self, tick: int) -> int | None:
        found = [v for v in self._here if self._index.alive_until[v] < tick]
        if not found:
            return None
        least = SMALL_SHARE * sum(self._bytes[v] for v in found) / len(found)
        return min((v for v in found if self._bytes[v] >= least), key=lambda v: (self._score(v), v))

    def _score(self, value: int) -> float:
        cost = self._index.seconds[self._index.op_of[value]]
        roots = {id(r): r for n in self._index.near[value] if n in self._evicted for r in (self._evicted[n].root(),)}
        cost += sum(root.cost for root in roots.values())
        return cost / (max(self._bytes[value], 1) * (self._now - self._last[value] + 1))
