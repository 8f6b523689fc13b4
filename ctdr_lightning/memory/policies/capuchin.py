"""Memory saving per second: Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning".

ASPLOS 2020.

Reproduced: accesses are measured in one passive step (the trace); candidates are tensors that are accessed again after
    the peak. Swapping: a tensor's free time lies between the end of its swap-out and the latest start of its
    swap-in; the tensor with the longest one is chosen first, unless it is negative. The in-trigger is the latest
    access before the swap-in must start. Where the step still waits, it comes a twentieth of the swap's time earlier.
    Recomputation: the tensor with the most memory saved per second (MSPS) is chosen, then the times of the others
    change: a tensor whose source is chosen must also recompute that source, and a chosen tensor's source is recomputed
    once more for each chosen tensor that needs it. It is collective: a replay keeps values on its way that are awaited.
    Where only negative free times are left, the cheaper of exposed swap and recomputation is taken, until it fits.
Modelled: where the peak is, after each choice, is asked of the simulator instead of the next measured step, and so is
    the wait. Without a link there is the recomputation alone.
Left out: the passive mode of the first step, which swaps when memory runs out; triggers moved by waits that were
    measured.
Claimed: up to 85 % less memory; BERT with a batch 7 times as large.

Complexity O(n^2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import RECOMPUTE, Action, Actions, Keep, Offload, Recompute
from ctdr_lightning.memory.simulator.away import link_to
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled, settled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.machine import Link
from ctdr_lightning.memory.traces.trace import Trace

_LEAST_S = 1e-9  # a view takes no time: without it, bytes a second would be infinite
EARLIER = 0.05  # the paper: the in-trigger comes earlier by 5 % of the swap time
FEEDBACK_STEPS = 20  # a whole swap's time, in steps of a twentieth


@dataclass
class Recomputable:
    """A tensor that may be recomputed.

    Attributes:
        value: Its value id.
        n_bytes: Bytes saved by recomputing it.
        sources: The tensors that its recomputation starts from.
        replay_s: Time from them to it.
        idle: Its last use in the forward and its first in the backward; between them recomputing it saves its bytes.
        extra_s: Time that others lose because it is gone.
    """

    value: int
    n_bytes: int
    sources: set[int]
    replay_s: float
    idle: tuple[int, int]
    extra_s: float = 0.0

    @property
    def msps(self) -> float:
        """Memory saving per second."""
        return self.n_bytes / max(self.replay_s + self.extra_s, _LEAST_S)


@POLICIES.register("capuchin", uses=frozenset({Keep, Recompute, Offload}))
def capuchin(step: Prepared, budget: Budget) -> Timeline:
    """Swap tensors with enough free time, and recompute those that save the most memory a second, until the peak fits.

    Raises:
        InfeasibleBudgetError: If the peak does not fit although nothing is left to recompute there.
    """
    return choose(step, _plans(step, budget), budget, "capuchin")


def _plans(step: Prepared, budget: Budget) -> Iterator[Actions]:
    yield _recomputed(step, budget)
    if step.trace.links:
        yield {}
        yield from _triggered_earlier(step, _hybrid(step, budget))


def _recomputed(step: Prepared, budget: Budget) -> Actions:
    """The one plan that fits, or where there is no limit the one with the least peak that is passed."""
    simulator, chosen = Simulator(step), dict[int, Recomputable]()
    candidates = candidates_of(step.trace)
    least, best = simulator.peak_bytes, dict(simulator.actions)
    while budget.peak_bytes is None or simulator.peak_bytes > budget.peak_bytes:
        peak = int(simulator.bytes_at().argmax())
        there = [c for c in candidates.values() if c.idle[0] < peak < c.idle[1]]
        if not there:
            break
        pick = max(there, key=lambda c: (c.msps, -c.value))
        take(pick, candidates, chosen)
        simulator.change({pick.value: RECOMPUTE})
        if simulator.peak_bytes < least:
            least, best = simulator.peak_bytes, dict(simulator.actions)
    return best


def _hybrid(step: Prepared, budget: Budget) -> Actions:
    """Swap or recompute, one tensor after the other."""
    trace, simulator, chosen = step.trace, Simulator(step), dict[int, Recomputable]()
    candidates = candidates_of(trace)
    link = link_to(trace, largest_link(trace))
    starts_s = simulator.base_starts_s()
    swaps = {e.value: e for e in layer_inputs(step, lambda op: True)}
    free_s = {value: _free_s(entry, link, starts_s) for value, entry in swaps.items()}
    actions: dict[int, Action] = {}
    while simulator.peak_bytes > (budget.peak_bytes or 0):
        peak = int(simulator.bytes_at().argmax())
        idle = [e for e in swaps.values() if e.read < peak < e.needed]
        swap = max(idle, key=lambda e: (free_s[e.value], -e.value), default=None)
        there = [c for c in candidates.values() if c.idle[0] < peak < c.idle[1]]
        again = max(there, key=lambda c: (c.msps, -c.value), default=None)
        exposed_s = -free_s[swap.value] if swap is not None else float("inf")
        if swap is not None and (again is None or exposed_s <= max(again.replay_s + again.extra_s, 0.0)):
            candidates.pop(swap.value, None)
            back = _trigger(trace, swap, link, starts_s)
            picked: dict[int, Action] = {swap.value: Offload(link.to, (), swap.read, -1, back)}
        elif again is not None:
            take(again, candidates, chosen)
            picked = {again.value: RECOMPUTE}
        else:
            break
        swaps = {value: entry for value, entry in swaps.items() if value not in picked}
        actions |= picked
        simulator.change(picked)
        simulator.change(settled(simulator, actions))
    return actions


def _free_s(entry: LayerInput, link: Link, starts_s: np.ndarray) -> float:
    """Free time: from the end of the swap-out to the latest start of the swap-in."""
    out_s, in_s = link.seconds(entry.n_bytes)
    return float(starts_s[entry.needed] - in_s - (starts_s[entry.read + 1] + out_s))


def _trigger(trace: Trace, entry: LayerInput, link: Link, starts_s: np.ndarray, early_s: float = 0.0) -> int:
    """The latest tick that the tape hears before the swap-in must start."""
    start_s = float(starts_s[entry.needed]) - link.seconds(entry.n_bytes)[1] - early_s
    bells = sorted(bells_of(trace))
    heard = bisect_right(bells, entry.needed)
    place = bisect_right(bells, start_s, hi=heard, key=lambda tick: float(starts_s[tick])) - 1
    return bells[max(place, 0)] if heard else entry.needed


def _triggered_earlier(step: Prepared, actions: Actions) -> Iterator[Actions]:
    """The plan, and variants in which the triggers of swap-ins that the step waits for come earlier, as in feedback."""
    trace = step.trace
    link = link_to(trace, largest_link(trace))
    inputs = {e.value: e for e in layer_inputs(step, lambda op: True)}
    now: dict[int, Action] = dict(actions)
    early: dict[int, float] = {}
    for _ in range(FEEDBACK_STEPS):
        settled = scheduled(step, now)
        yield settled
        simulator = Simulator(step, settled)
        late = [m.value for m in simulator.transfers().moves if m.wait_s and not m.out and m.value in inputs]
        if not late:
            return
        for value in late:
            early[value] = early.get(value, 0.0) + EARLIER * link.seconds(inputs[value].n_bytes)[1]
            back = _trigger(trace, inputs[value], link, simulator.base_starts_s(), early[value])
            now[value] = Offload(link.to, (), inputs[value].read, -1, back)


def candidates_of(trace: Trace) -> dict[int, Recomputable]:
    """Every saved tensor that can be recomputed, as if all others were there."""
    found = {}
    for value in trace.saved:
        if value in trace.droppable:
            sources, seconds = _back_to_saved(trace, value)
            found[value] = Recomputable(value, trace.value_bytes(value), sources, seconds, _idle(trace, value))
    return found


def take(pick: Recomputable, candidates: dict[int, Recomputable], chosen: dict[int, Recomputable]) -> None:
    """Choose a tensor, and bring the times of those that are connected with it up to date (Algorithm 2)."""
    del candidates[pick.value]
    chosen[pick.value] = pick
    touched = set(pick.sources)
    for other in (*chosen.values(), *candidates.values()):
        if pick.value in other.sources:
            other.sources = (other.sources - {pick.value}) | pick.sources
            if other.value in candidates:
                other.replay_s += pick.replay_s
                touched.add(other.value)
    for value in touched & candidates.keys():
        candidates[value].extra_s = candidates[value].replay_s * sum(value in c.sources for c in chosen.values())


def _idle(trace: Trace, value: int) -> tuple[int, int]:
    """The value's last use in the forward and its first in the backward; nothing lies between where there is none."""
    record = trace.values[value]
    end = trace.storages[record.storage].end
    return end, min((tick for save in record.saves for tick in save.unpacked), default=end)


def _back_to_saved(trace: Trace, value: int) -> tuple[set[int], float]:
    """The saved tensors, weights and inputs from which a value is made, and the time of the ops in between."""
    ops, sources, stack = set[int](), set[int](), [value]
    while stack:
        current = stack.pop()
        op = trace.values[current].op
        if current != value and (trace.values[current].saves or current not in trace.droppable):
            sources.add(current)
        elif op not in ops:
            ops.add(op)
            stack.extend(trace.ops[op].inputs)
    return sources, sum(trace.replay_seconds(op) for op in ops)
