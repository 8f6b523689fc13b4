"""Belady's rule on top of a plan: where it has no room, the value with the farthest next use waits elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import KEEP, Action, Actions, Offload, action_of
from ctdr_lightning.memory.simulator.away import link_to
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.bells import bells_of


def swapped(step: Prepared, limit_bytes: int, actions: Actions) -> Actions:
    """A plan, with kept values swapped by Belady's rule wherever it has no room.

    Args:
        step: The recorded step, with a link.
        limit_bytes: The room.
        actions: The plan.
    """
    simulator, link = Simulator(step, actions), link_to(step.trace, largest_link(step.trace))
    live = simulator.bytes_at().copy()
    if not any(isinstance(action, Offload) and action.to == link.to for action in actions.values()):
        live += link.device_bytes
    inputs = [e for e in layer_inputs(step, lambda op: True) if action_of(step.trace, actions, e.value) == KEEP]
    gone = evicted(live, _as_needed(inputs, simulator), limit_bytes)
    heard = sorted(bells_of(step.trace))
    found: dict[int, Action] = dict(actions)
    for entry in sorted(gone, key=lambda e: e.needed):
        back = _earliest(live, heard, entry, limit_bytes)
        live[back : entry.needed] += entry.n_bytes
        found[entry.value] = Offload(link.to, (), entry.read, -1, back)
    return scheduled(step, found)


def _as_needed(inputs: list[LayerInput], simulator: Simulator) -> list[LayerInput]:
    """The values with their first use in a plan: a replay may read one before the backward does."""
    return [replace(e, needed=n) for e in inputs if (n := simulator.needed(e.value)[0]) is not None]


def evicted(live: np.ndarray, inputs: list[LayerInput], limit_bytes: int) -> list[LayerInput]:
    """Choose the values that leave, tick by tick; ``live`` loses their bytes from their last read to their next use."""
    gone: list[LayerInput] = []
    there: list[tuple[int, int, int, LayerInput]] = []  # a heap: the farthest next use first, the largest of equals
    waiting = sorted(inputs, key=lambda e: -e.read)
    for tick in np.flatnonzero(live > limit_bytes).tolist():
        while waiting and waiting[-1].read < tick:
            entry = waiting.pop()
            heappush(there, (-entry.needed, -entry.n_bytes, -len(waiting), entry))
        while live[tick] > limit_bytes and there and there[0][-1].needed > tick:
            farthest = heappop(there)[-1]
            gone.append(farthest)
            live[farthest.read + 1 : farthest.needed] -= farthest.n_bytes
    return gone


def _earliest(live: np.ndarray, heard: list[int], entry: LayerInput, limit_bytes: int) -> int:
    """The first tick that the tape hears from which there is room until the tensor is needed."""
    stretch = live[entry.read + 1 : entry.needed]
    full = np.flatnonzero(stretch + entry.n_bytes > limit_bytes)
    first = entry.read + 1 + (int(full[-1]) + 1 if len(full) else 0)
    place = bisect_left(heard, first)
    return min(heard[place], entry.needed) if place < len(heard) else entry.needed
