"""Tensors that live long migrate, an interval of layers at a time.

Ren et al., "Sentinel: Efficient Tensor Migration and Allocation on Heterogeneous Memory Systems for Deep Learning",
HPCA 2021, arXiv 1909.05182.

Reproduced: tensors that live for less than a layer never migrate; the others do by intervals of so many layers: tensors
    that an interval read last leave during the next one, and at the start of each interval the tensors of the one after
    it are prefetched. The length of the interval is the largest whose data fit into the memory that is left and are
    moved in the interval's time; where both cannot hold, lengths are tried.
Modelled: which lengths hold is asked of the simulator, for each length of a geometric series. A layer is a forward op
    that reads a saved value.
Left out: pages, the profiling of memory accesses by faults, the reserved pool for short-lived tensors.
Claimed: 80 % less fast memory at comparable speed.

Complexity O(n log n) simulations of which there are O(log n).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.bells import heard_before


@POLICIES.register("sentinel", uses=frozenset({Keep, Offload}))
def sentinel(step: Prepared, budget: Budget) -> Timeline:
    """Migrate by intervals of the length that suits the budget best.

    Raises:
        InfeasibleBudgetError: If no length fits.
    """
    return choose(step, _plans(step), budget, "sentinel")


def _plans(step: Prepared) -> Iterator[Actions]:
    yield {}
    to = largest_link(step.trace)
    inputs = layer_inputs(step, lambda op: True) if to else []
    length = 1
    while length <= len(inputs):
        yield _migrated(step, inputs, to, length)
        length *= 2


def _migrated(step: Prepared, inputs: list[LayerInput], to: str, length: int) -> Actions:
    """Intervals of ``length`` layers, in the forward by when they read and in the backward by when they need."""
    reads = _starts([entry.read for entry in inputs], length)
    needs = _starts([entry.needed for entry in inputs], length)
    actions: dict[int, Action] = {}
    for entry in inputs:
        mine = bisect_right(reads, entry.read)  # the interval after the one that reads it
        if entry.needed <= needs[0] and len(needs) > 1:
            continue  # the first interval of the backward needs it: nothing is gained on the way
        out = reads[mine] if mine < len(reads) else entry.read
        gone = reads[mine + 1] if mine + 1 < len(reads) else -1
        before = max(bisect_right(needs, entry.needed) - 2, 0)
        actions[entry.value] = Offload(
            to, (), max(out, entry.read), gone, heard_before(step.trace, needs[before], entry.needed)
        )
    return scheduled(step, actions)


def _starts(ticks: list[int], length: int) -> list[int]:
    return sorted(set(ticks))[::length]
