"""Dynamic tensor rematerialization, projected: Kirisame et al., "Dynamic Tensor Rematerialization".

ICLR 2021, arXiv 2006.09616. The online policy itself is ``online``; this is its static projection, a plan made of the
decisions that it would take on the trace.

Reproduced: whenever the live bytes exceed the budget, the tensor with the least h = cost / (bytes * staleness) is
    evicted, where cost is its own op's and that of its evicted neighbourhood, kept by union-find (h^eq); tensors under
    1 % of the mean size are ignored, and of many a random sample is compared.
Modelled: time is counted in ticks of the trace. A plan cannot evict under pressure in the backward: a tensor that comes
    back stays for its next use, but evicted ones are made again at each use where the plan's own peak asks for it:
    those first that were evicted most often, of a sample the least cost for its bytes. The budget that the decisions
    are taken under is lowered until a plan fits in which everything stays, as that is the fastest; the simulator
    chooses. Where the rule evicts much in the backward a plan is slower than it. On fake traces ResNet-50 and GoogLeNet
    are as fast down to 0.3 of the peak; at 0.4 RN18 is 3 %, R 5 % and DenseNet-121 on small images 10 % behind, R at
    0.3 11 %, ResNet-50 at 0.2 79 %. The sample is of 128, where the paper takes the square root of their number.
Left out: budgets under which the policy thrashes.

Complexity O(n) for each eviction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random

import numpy as np

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.simulator.actions import RECOMPUTE, RECOMPUTE_EACH
from ctdr_lightning.memory.simulator.evicted import SMALL_SHARE, EvictedSet
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline

# By how much the budget of the decisions is lowered where the plan's own peak does not fit: half of it after ten steps.
# Other factors were not tried.
TIGHTER = 0.93
# How many tensors that help at the peak are compared before one of them no longer stays, those evicted most
# often first. Not tuned.
SAMPLE = 24
# Work of the simulator on that, over all budgets: about two seconds. Where most of a net is one group (a TreeLSTM at a
# fifth of its peak) it would be minutes.
MOST_WORK = 400_000
# Candidates that an eviction compares. With all of an LSTM (1,792) a projection at half its peak took 7 s, x1.289,
# with 128 of them 2.4 s, x1.277; a TreeLSTM at 0.2 fits with 128 alone. Other numbers were not tried.
MOST_CANDIDATES = 128
# The policy thrashes where it takes so many times the plain step. Wherever a plan fitted, on 18 nets at four budgets,
# it took x4 at most; one projection in which an LSTM took x11 was a minute's work.
THRASHES = 8
# The search gives up after so many lowered budgets in a row without a lower peak. Not tuned.
PATIENCE = 3


@POLICIES.register("dtr")
def dtr(step: Prepared, budget: Budget) -> Timeline:
    """Evict the values that the online policy would evict under the budget.

    Raises:
        InfeasibleBudgetError: If the plan exceeds the budget however early the policy starts to evict.
    """
    return choose(step, _projections(step, budget), budget, "dtr")


def _projections(step: Prepared, budget: Budget) -> Iterator[Timeline]:
    """Projections for tighter and tighter budgets, to the first that stays and fits, while the peak goes down.

    Where none fits, the last evicts all that it may, whatever the budget: a budget that an error names is accepted.
    """
    limit_bytes, least = budget.peak_bytes, step.plain_peak_bytes
    room: float = (least if limit_bytes is None else limit_bytes) - step.trace.resident_bytes
    in_vain, work, thrashes = 0, MOST_WORK, False
    while in_vain < PATIENCE and not thrashes:
        simulator, evicted, thrashes = _projected(step, int(room))
        yield simulator.timeline()
        if limit_bytes is not None and simulator.peak_bytes <= limit_bytes:
            return
        _make_again_at_each_use(simulator, evicted, limit_bytes or 0, work)
        work -= simulator.work
        yield simulator.timeline()
        in_vain = 0 if simulator.peak_bytes < least else in_vain + 1
        least, room = min(simulator.peak_bytes, least), room * TIGHTER
    if limit_bytes is not None and least > limit_bytes:
        simulator, evicted, _ = _projected(step, 0)
        _make_again_at_each_use(simulator, evicted, limit_bytes, MOST_WORK)
        yield simulator.timeline()


def _projected(step: Prepared, room_bytes: int) -> tuple[Simulator, list[int], bool]:
    """The plan in which evicted values stay once back; the values, most often evicted first; whether it thrashes."""
    projection = Projection(step, step.trace.resident_bytes + room_bytes)
    evicted = projection.run()
    simulator = Simulator(step, dict.fromkeys(evicted, RECOMPUTE))
    return simulator, sorted(evicted, key=lambda v: -evicted[v]), projection.thrashes


def _make_again_at_each_use(simulator: Simulator, again: list[int], limit_bytes: int, most_work: int) -> None:
    """Let values no longer stay, as long as the peak is over the limit: of a sample the least cost for its bytes."""
    left = dict.fromkeys(again)
    while left and simulator.peak_bytes > limit_bytes and simulator.work < most_work:
        tick = int(simulator.bytes_at().argmax())
        prices: dict[int, float] = {}
        for value in left:
            trial = simulator.trial({value: RECOMPUTE_EACH})
            taken = -sum(n_bytes for first, end, n_bytes in trial.segments if first <= tick < end)
            if taken > 0:
                prices[value] = trial.seconds / taken
            if len(prices) == SAMPLE:
                break
        if not prices:
            return
        pick = min(prices, key=lambda value: prices[value])
        simulator.change({pick: RECOMPUTE_EACH})
        del left[pick]


class Projection:
    """A step under the online policy, played on a trace.

    Args:
        step: The recorded step.
        budget_bytes: When to evict.

    Attributes:
        seconds: Time of the online policy itself, which may evict under pressure; known after ``run``.
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
        self._here_bytes = 0
        self._now = 0
        self._evicted: dict[int, EvictedSet] = {}
        self._times: dict[int, int] = {}
        self._random = Random(0)
        self.seconds = trace.seconds

    def run(self) -> dict[int, int]:
        """Play the step; returns how often each value was evicted, in the order in which they last were.

        It ends early where the policy thrashes.
        """
        events = self._events()
        for tick in range(self._trace.n_ticks):
            for kind, value in events[tick]:
                self._happen(kind, value, tick)
            self._make_room(tick)
            if self.thrashes:
                break
        return dict(self._times)

    @property
    def thrashes(self) -> bool:
        """Whether the policy makes values again for the most part, so that it was given up."""
        return self.seconds > THRASHES * self._trace.seconds

    def _without(self, plain: np.ndarray) -> np.ndarray:
        """Live bytes without the values that can be evicted."""
        steps = np.zeros(len(plain) + 2, dtype=np.int64)
        for value in self._values:
            steps[self._trace.ops[self._index.op_of[value]].tick] += self._bytes[value]
            steps[self._end(value) + 1] -= self._bytes[value]
        return plain - np.cumsum(steps)[: len(plain)]

    def _end(self, value: int) -> int:
        return min(max(self._index.released[value], self._index.alive_until[value]), self._trace.n_ticks)

    def _events(self) -> dict[int, list[tuple[str, int]]]:
        """The events of values at each tick."""
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
            self._go(value)
            self._evicted.pop(value, None)
            self._bytes.pop(value, None)

    def _come(self, value: int) -> None:
        if value not in self._here:
            self._here.add(value)
            self._here_bytes += self._bytes[value]
        self._evicted.pop(value, None)

    def _go(self, value: int) -> None:
        if value in self._here:
            self._here.remove(value)
            self._here_bytes -= self._bytes[value]

    def _leave(self, value: int) -> None:
        """A value is evicted, or an unsaved one dies: its cost joins that of its evicted neighbourhood."""
        cost = self._evicted[value] = EvictedSet(self._index.seconds[self._index.op_of[value]])
        for near in self._index.near[value]:
            if near in self._evicted:
                cost.join(self._evicted[near])

    def _fetch(self, value: int, tick: int) -> None:
        """A value is requested: missing values are replayed, and awaited ones stay."""
        stack = [value] if value not in self._here else []
        seen: set[int] = set()
        while stack:
            current = stack.pop()
            there = current in self._here or self._index.alive_until[current] >= tick
            if current in seen or there or not self._index.droppable[current]:
                continue
            seen.add(current)
            stack.extend(self._index.sources[self._index.op_of[current]])
        self.seconds += sum(self._index.seconds[op] for op in {self._index.op_of[v] for v in seen})
        for current in seen & self._bytes.keys():
            self._times.setdefault(current, 1)
            self._come(current)
            self._last[current] = self._now

    def _make_room(self, tick: int) -> None:
        while int(self._others[tick]) + self._here_bytes > self._budget_bytes:
            victim = self._choose(tick)
            if victim is None:
                return
            self._go(victim)
            self._leave(victim)
            self._times[victim] = self._times.pop(victim, 0) + 1

    def _choose(self, tick: int) -> int | None:
        found = [v for v in self._here if self._index.alive_until[v] < tick]
        if not found:
            return None
        least = SMALL_SHARE * sum(self._bytes[v] for v in found) / len(found)
        large = [v for v in found if self._bytes[v] >= least]
        if len(large) > MOST_CANDIDATES:
            large = self._random.sample(large, MOST_CANDIDATES)
        return min(large, key=lambda v: (self._score(v), v))

    def _score(self, value: int) -> float:
        cost = self._index.seconds[self._index.op_of[value]]
        roots = {id(r): r for n in self._index.near[value] if n in self._evicted for r in (self._evicted[n].root(),)}
        cost += sum(root.cost for root in roots.values())
        return cost / (max(self._bytes[value], 1) * (self._now - self._last[value] + 1))
