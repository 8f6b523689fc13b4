"""Ticks at which a program limits bytes: first the highest of the plain step, then the worst of plans over the budget.

Complexity: one simulation a plan.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ctdr_lightning.memory.bounds.staged_program import choose_ticks, least_bytes_at
from ctdr_lightning.memory.simulator.actions import Actions
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator

# Ticks that a plan adds, and how many ticks around each of them count as the same place.
TICKS_A_PLAN, NEAR = 2, 3


class LimitedTicks:
    """The ticks of one budget.

    Args:
        step: The step to plan.
        peak_bytes: Largest peak, weights included.

    Attributes:
        ticks: Ticks of ops at which bytes are limited.
    """

    def __init__(self, step: Prepared, peak_bytes: int) -> None:
        self._step = step
        self._limit = peak_bytes
        self.ticks: set[int] = set(choose_ticks(step.trace, step.plain_bytes_at, peak_bytes, 1))

    def add_worst(self, actions: Actions) -> bool:
        """Limit bytes at the worst places of a plan; whether there was one where they were not limited."""
        live, n_added = Simulator(self._step, actions).bytes_at().copy(), 0
        while n_added < TICKS_A_PLAN and live.max() > self._limit:
            worst = int(live.argmax())
            live[max(worst - NEAR, 0) : worst + NEAR + 1] = 0
            more = self._around(worst) - self.ticks
            self.ticks |= more
            n_added += bool(more)
        return n_added > 0

    def _around(self, tick: int) -> set[int]:
        """An op's tick itself; of an unpack those on both sides, so that it is alone between them."""
        places = self._places
        if tick in places.ops:
            return {tick}
        asks, at = places.asks, bisect_left(places.asks, tick)
        before = asks[at - 1] if at else -1
        after = asks[at + 1] if at + 1 < len(asks) else self._step.trace.n_ticks
        return places.highest(before + 1, tick) | places.highest(tick + 1, after)

    @property
    def _places(self) -> _Places:
        return self._step.once("places", lambda: _Places(self._step))


class _Places:
    """Ticks at which bytes can be limited.

    Attributes:
        ops: Ticks of ops.
        asks: Ticks at which the backward asks for a value that may be dropped, rising.
    """

    def __init__(self, step: Prepared) -> None:
        trace = step.trace
        self.ops = {op.tick for op in trace.ops}
        saves = (s for v in trace.saved if v in trace.droppable for s in trace.values[v].saves)
        self.asks = sorted(t for s in saves for t in s.unpacked)
        self._bytes_at = np.where([t in self.ops for t in range(trace.n_ticks)], least_bytes_at(step), -1)

    def highest(self, first: int, end: int) -> set[int]:
        """The op's tick in a range at which most is there under every plan; empty where no op runs in it."""
        if first >= end or self._bytes_at[first:end].max() < 0:
            return set()
        return {first + int(self._bytes_at[first:end].argmax())}
