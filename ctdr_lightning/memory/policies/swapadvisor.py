"""Tensors that are needed last are swapped out first, and swapped in as soon as there is room.

Huang, Jin, Li, "SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping", ASPLOS 2020.

Reproduced: its swap planner: wherever the step has no room, the tensor with the farthest next use goes (Belady's rule);
    it is swapped in as soon as there is room for it, the first needed first. The step waits for both where it must.
Modelled: room is the budget, asked of the simulated bytes at each tick. A tensor leaves once, after its last read of
    the forward.
Left out: the genetic search over orders of ops and over pools of size classes: an eager step has one order, and
    PyTorch's allocator the pools.
Claimed: nets of up to 12 times the memory at 53 to 99 % of the throughput that unlimited memory gives.

Complexity O(n log n + n t) for t ticks.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush

import numpy as np

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose, waiting_for_room
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.bells import bells_of

# Without a peak in the budget, rooms of these shares of the bytes above the resident ones are planned for.
SHARES = (0.75, 0.5, 0.25)


@POLICIES.register("swapadvisor", uses=frozenset({Keep, Offload}))
def swapadvisor(step: Prepared, budget: Budget) -> Timeline:
    """Swap by Belady's rule.

    Raises:
        InfeasibleBudgetError: If the least that swapping reaches does not fit.
    """
    trace, plain = step.trace, step.plain_peak_bytes
    above = plain - trace.resident_bytes
    limits = [trace.resident_bytes + int(share * above) for share in SHARES]
    limits = limits if budget.peak_bytes is None else [budget.peak_bytes]
    to = largest_link(trace)
    plans = [_swapped(step, to, limit) for limit in limits] if to else []
    return choose(step, waiting_for_room(step, [{}, *plans], budget), budget, "swapadvisor")


def _swapped(step: Prepared, to: str, limit_bytes: int) -> Actions:
    simulator = Simulator(step)
    live = simulator.bytes_at().copy()
    inputs = layer_inputs(step, lambda op: True)
    gone = _evict(live, inputs, limit_bytes)
    heard = sorted(bells_of(step.trace))
    actions: dict[int, Action] = {}
    for entry in sorted(gone, key=lambda e: e.needed):
        back = _earliest(live, heard, entry, limit_bytes)
        live[back : entry.needed] += entry.n_bytes
        actions[entry.value] = Offload(to, (), entry.read, -1, back)
    return scheduled(step, actions)


def _evict(live: np.ndarray, inputs: list[LayerInput], limit_bytes: int) -> list[LayerInput]:
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
