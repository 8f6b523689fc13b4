"""Tensors in the order of the forward wait on an SSD.

Bae et al., "FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks", FAST 2021.

Reproduced: linear tensor selection: tensors are marked for the SSD in the order of the forward until the rest fits. If
    writing them takes longer than the step computes, the compression-aware phase writes as many of them in half
    precision, those that spare most first, until it does not. The step waits for writes where it has no room.
Modelled: whether the rest fits is asked of the simulator. Half precision is bfloat16, where the user allows that codec.
Left out: copies between GPU and SSD that pass the host by; compressed sparse rows, and with them the second phase's
    exchange of marked tensors for sparser ones.
Claimed: batches 12.4 to 14.0 times as large on a card of 16 GB.

Complexity O(log n) simulations, by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose, waiting_for_room
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Actions, Keep, Offload
from ctdr_lightning.memory.simulator.away import away_bytes, link_to
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.room import with_room
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.trace import Trace

HALF, HALF_BYTES = "bf16", 2


@POLICIES.register("flashneuron", uses=frozenset({Keep, Offload}), exact=False)
def flashneuron(step: Prepared, budget: Budget) -> Timeline:
    """Move the first tensors of the forward, as many as must go.

    Raises:
        InfeasibleBudgetError: If moving all of them does not fit.
    """
    return choose(step, waiting_for_room(step, _plans(step, budget), budget), budget, "flashneuron")


def _plans(step: Prepared, budget: Budget) -> Iterator[Actions]:
    yield {}
    trace = step.trace
    names = [link.to for link in trace.links]
    to = "disk" if "disk" in names else largest_link(trace)
    if not to:
        return
    inputs = sorted(layer_inputs(step, lambda op: True), key=lambda entry: entry.value)
    marked = inputs[: _fewest(step, inputs, to, budget)]
    yield _sent(marked, to, set())
    if narrow := _narrowed(trace, marked, to):
        yield _sent(marked, to, narrow)


def _fewest(step: Prepared, inputs: list[LayerInput], to: str, budget: Budget) -> int:
    """The number of first inputs that must go until the rest fits; all of them without a limit."""
    limit = budget.peak_bytes
    if limit is None:
        return len(inputs)

    def fits(n: int) -> bool:
        return Simulator(step, with_room(step, _sent(inputs[:n], to, set()), limit)).peak_bytes <= limit

    return bisect_left(range(len(inputs)), True, key=fits)


def _narrowed(trace: Trace, marked: list[LayerInput], to: str) -> set[int]:
    """Values to write in half precision, the largest first, until writing takes no longer than the step computes."""
    if not any(cost.name == HALF for cost in trace.codecs):
        return set()
    facts, link = facts_of(trace), link_to(trace, to)
    over_s, found = sum(link.seconds(e.n_bytes)[0] for e in marked) - trace.seconds, set[int]()
    for entry in sorted(marked, key=lambda entry: -entry.n_bytes):
        if over_s > 0 and "float" in facts[entry.value].kinds and facts[entry.value].item_bytes > HALF_BYTES:
            found.add(entry.value)
            over_s -= link.seconds(entry.n_bytes)[0] - link.seconds(away_bytes(trace, entry.value, (HALF,)))[0]
    return found


def _sent(marked: list[LayerInput], to: str, narrow: set[int]) -> Actions:
    return {entry.value: Offload(to, (HALF,) if entry.value in narrow else ()) for entry in marked}
