"""Everything lives in managed memory and is fetched a layer ahead.

Awan et al., "OC-DNN: Exploiting Advanced Unified Memory Capabilities in CUDA 9 and Volta GPUs for Out-of-Core DNN
Training", HiPC 2018.

Reproduced: the inputs of all layers may leave the device as soon as their layer has read them (the eviction hint after
    the last use), and are prefetched while the backward of the layer after theirs runs. The step waits for an eviction
    only where it has no room (``simulator/room.py``).
Modelled: managed memory and its page faults as transfers over the link; a prefetch that comes late stalls.
Left out: weights in managed memory with read-mostly advice.
Claimed: up to 1.9 times as fast as naive managed memory.

Complexity O(n log n).
"""

from __future__ import annotations

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose, waiting_for_room
from ctdr_lightning.memory.search.layered import largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.bells import heard_before


@POLICIES.register("ocdnn", uses=frozenset({Keep, Offload}))
def ocdnn(step: Prepared, budget: Budget) -> Timeline:
    """Move nothing, or the inputs of all layers.

    Raises:
        InfeasibleBudgetError: If neither fits.
    """
    return choose(step, waiting_for_room(step, [{}, _managed(step)], budget), budget, "ocdnn")


def _managed(step: Prepared) -> Actions:
    to = largest_link(step.trace)
    inputs = layer_inputs(step, lambda op: True) if to else []
    needs = sorted({entry.needed for entry in inputs})
    ahead = dict(zip(needs[1:], needs[:-1], strict=True))  # when the layer after it begins its backward
    actions: dict[int, Action] = {
        e.value: Offload(to, (), e.read, -1, heard_before(step.trace, ahead.get(e.needed, e.needed), e.needed))
        for e in inputs
    }
    return scheduled(step, actions)
