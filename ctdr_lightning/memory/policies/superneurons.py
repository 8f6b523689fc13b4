"""Cost-aware recomputation: Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Networks".

PPoPP 2018, arXiv 1801.04380.

Reproduced: liveness (in the trace: nothing is held longer than someone needs it); outputs of layers with weights are
    checkpoints, outputs of the cheap layers between them are dropped; each such segment is recomputed speed-centric
    (once, all of it kept until its backward is done) where its memory cost is within max l_i, the largest working set
    of a single layer, else memory-centric (again for each use), so that no segment sets the peak. Unified tensor pool:
    the device is a cache of the checkpoints; only where it is full the least recently used one is moved to the host.
Modelled: l_i is the bytes that one backward op reads and writes. In a forward the least recently used checkpoint is
    the earliest; the simulator gives the number that must go. Without a link there is no pool.
Left out: the choice of convolution algorithms.
Claimed: nets at least 3.2 times as deep; a ResNet of 10,000 layers on a card of 12 GB.

Complexity O(n).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import (
    KEEP,
    RECOMPUTE,
    RECOMPUTE_EACH,
    Action,
    Actions,
    Keep,
    Offload,
    Recompute,
)
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.op_kinds import is_cheap, is_weighted
from ctdr_lightning.memory.traces.trace import Trace


@POLICIES.register("superneurons", uses=frozenset({Keep, Recompute, Offload}))
def superneurons(step: Prepared, budget: Budget) -> Timeline:
    """Recompute outputs of cheap layers, each segment the fast way if that does not set the peak.

    Raises:
        InfeasibleBudgetError: If neither plain autograd nor the cost-aware plan fits, nor the one that recomputes
            every segment for each use.
    """
    trace, segments = step.trace, cheap_segments(step)
    limit = largest_working_set(trace)
    cost_aware = (RECOMPUTE if memory_cost(trace, s) <= limit else RECOMPUTE_EACH for s in segments)
    plans: tuple[Actions, ...] = (
        {},
        spread(trace, segments, cost_aware),
        spread(trace, segments, (RECOMPUTE_EACH for _ in segments)),
    )
    return choose(step, (*plans, *_cached(step, plans[1], budget)), budget, "superneurons")


def _cached(step: Prepared, actions: Actions, budget: Budget) -> Iterator[Actions]:
    """The plan with as few checkpoints on the host as the budget allows; all of them where there is none."""
    trace = step.trace
    to = largest_link(trace)
    if not to:
        return
    inputs = layer_inputs(step, lambda op: True)
    held = [e for e in inputs if is_weighted(trace.ops[trace.values[e.value].op])]
    low, high = (0, len(held)) if budget.peak_bytes is not None else (len(held), len(held))
    while low < high:
        middle = (low + high) // 2
        fits = Simulator(step, _moved(step, actions, held[:middle], to)).peak_bytes <= (budget.peak_bytes or 0)
        low, high = (low, middle) if fits else (middle + 1, high)
    yield _moved(step, actions, held[:low], to)


def _moved(step: Prepared, actions: Actions, inputs: Sequence[LayerInput], to: str) -> Actions:
    return scheduled(step, {**actions, **{e.value: Offload(to) for e in inputs}})


def cheap_segments(step: Prepared) -> list[list[int]]:
    """The values between checkpoints: outputs of cheap ops, connected through these ops."""
    trace, near = step.trace, step.index.near
    left = {v for v in trace.droppable if is_cheap(trace.ops[trace.values[v].op])}
    segments = []
    for first in sorted(left):
        if first not in left:
            continue
        left.discard(first)
        segment = [first]
        for value in segment:
            found = [v for v in near[value] if v in left]
            left.difference_update(found)
            segment += found
        segments.append(segment)
    return segments


def working_set(trace: Trace, op: int) -> int:
    """Bytes that one op reads and writes, its workspace included: l_i."""
    record = trace.ops[op]
    touched = {trace.values[v].storage for v in (*record.inputs, *record.outputs) if v >= 0}
    return sum(trace.storages[s].n_bytes for s in touched if trace.storages[s].born >= 0) + record.temp_bytes


def largest_working_set(trace: Trace) -> int:
    """The largest l_i: below it no plan can go without splitting an op."""
    return max((working_set(trace, i) for i in range(len(trace.ops))), default=0)


def memory_cost(trace: Trace, segment: Iterable[int]) -> int:
    """Bytes that are live when a segment was recomputed as a whole and its backward begins: its values, and l_i."""
    saved = [v for v in segment if trace.values[v].saves]
    asked = min((tick for v in saved for save in trace.values[v].saves for tick in save.unpacked), default=0)
    first = bisect_right(trace.ops, asked, key=lambda op: op.tick)
    return sum(trace.value_bytes(v) for v in saved) + (working_set(trace, first) if first < len(trace.ops) else 0)


def spread(trace: Trace, segments: Iterable[list[int]], actions: Iterable[Action]) -> Actions:
    """One action for each segment; checkpoints that autograd does not save are held."""
    inside = {v: a for s, a in zip(segments, actions, strict=False) for v in s}
    held = {v: KEEP for v in trace.droppable if v not in inside and not trace.values[v].saves}
    return {**held, **{v: a for v, a in inside.items() if trace.values[v].saves}}
