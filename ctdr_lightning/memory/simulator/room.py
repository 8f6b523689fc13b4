"""Transfers that the step waits for, where it has no room otherwise.

In the systems that swap tensors an allocation waits: it returns when enough of what is on its way out has gone. A plan
knows its step, so the same waits become ticks. Where the forward has no room, the transfers that were sent first are
waited for before the op that needs it; where the backward has none, the values that are needed last are asked back
later. Both cost the time that the link takes and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ctdr_lightning.memory.simulator.actions import Action, Actions, Offload, away_values
from ctdr_lightning.memory.simulator.away import away_bytes
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.bells import bells_of

# A value's memory may outlast its departure (a view of it is still there), so that one round frees less than it counts.
# Not tuned.
ROUNDS = 3


def with_room(step: Prepared, actions: Actions, limit_bytes: int) -> dict[int, Action]:
    """The actions, with waits for transfers wherever the step would exceed a limit.

    Args:
        step: The recorded step, with its links.
        actions: By value id; an ``Offload`` may leave its ticks open.
        limit_bytes: The peak to stay within, where waiting is enough for that.

    Returns:
        Actions with every tick settled. Their peak may exceed the limit: the simulator judges.
    """
    found = scheduled(step, actions)
    for _ in range(ROUNDS):
        simulator = Simulator(step, found)
        if simulator.peak_bytes <= limit_bytes:
            break
        changed = dict(_Room(simulator, limit_bytes).waits())
        if not changed:
            break
        found |= changed
    return found


class _Room:
    """The bytes of a step over time, as its waits change them."""

    def __init__(self, simulator: Simulator, limit_bytes: int) -> None:
        trace = self._trace = simulator.trace
        self._live, self._limit_bytes = simulator.bytes_at().copy(), limit_bytes
        self._moved = {v: a for v, a in away_values(trace, simulator.actions).items() if isinstance(a, Offload)}
        self._needed = {v: simulator.needed(v)[0] for v in self._moved}
        self._forward = [trace.ops[index].tick for index in trace.forward_ops]
        self._bells = sorted(bells_of(trace))

    def waits(self) -> Iterator[tuple[int, Offload]]:
        """The actions that change: first those of the forward, in the order of the lane, then those of the backward."""
        yield from self._waited_for().items()
        yield from self._asked_later().items()

    def _waited_for(self) -> dict[int, Offload]:
        """Departures, the first sent first, waited for before the first op of the forward that has no room."""
        order = sorted(self._moved, key=lambda v: (self._moved[v].out_at, v))
        changed: dict[int, Offload] = {}
        for tick in self._full(0, self._forward[-1] + 1):
            place = bisect_left(self._forward, tick) - 1
            before = self._forward[place] if place >= 0 else -1
            for value in order:
                action = self._moved[value]
                if self._live[tick] <= self._limit_bytes or action.out_at > before:
                    break
                if action.gone_by >= tick:
                    self._live[before + 1 : action.gone_by + 1] -= self._held_bytes(value, action)
                    changed[value] = self._moved[value] = replace(action, gone_by=before)
        return changed

    def _asked_later(self) -> dict[int, Offload]:
        """Returns, the last needed first, asked for after the op of the backward that has no room."""
        needed = {v: n for v, n in self._needed.items() if n is not None}
        order = sorted(needed, key=lambda v: (-needed[v], v))
        changed: dict[int, Offload] = {}
        for tick in self._full(self._forward[-1] + 1, len(self._live)):
            for value in order:
                action = self._moved[value]
                if self._live[tick] <= self._limit_bytes or needed[value] <= tick:
                    break
                if action.back_at <= tick:
                    back = self._next_bell(tick, needed[value])
                    self._live[max(action.back_at, 0) : back] -= self._held_bytes(value, action)
                    changed[value] = self._moved[value] = replace(action, back_at=back)
        return changed

    def _full(self, first: int, end: int) -> Iterator[int]:
        """Ticks above the limit, as they are when their turn comes."""
        for tick in (first + np.flatnonzero(self._live[first:end] > self._limit_bytes)).tolist():
            if self._live[tick] > self._limit_bytes:
                yield tick

    def _held_bytes(self, value: int, action: Offload) -> int:
        """Bytes that a transfer takes here: the value, or its code where it has one."""
        return away_bytes(self._trace, value, action.codecs) if action.codecs else self._trace.value_bytes(value)

    def _next_bell(self, tick: int, needed: int) -> int:
        """The next tick at which the tape can ask for a value, at the latest where it is needed."""
        place = bisect_right(self._bells, tick)
        return min(self._bells[place], needed) if place < len(self._bells) else needed
