"""Tensors on long edges of the graph are swapped out.

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", 2018, arXiv 1807.02037.

Reproduced: an edge from an op to one that is more than ``lb`` ops later in topological order gets a swap-out and a
    swap-in; the swap-in is triggered by an op at least ``lb`` ops before its reader; swap-ins of one tensor are fused;
    the ``n_tensors`` largest are taken.
Modelled: distances are ticks of the recorded step, as an eager step has one order. ``lb`` and ``n_tensors``, which its
    users tune by hand, are tried in a few steps, and the simulator chooses. TensorFlow's allocator waits where it has
    no room; here the step waits for transfers (``simulator/room.py``).
Left out: ``ub``, which bounds how early a swap-in may start: the trigger is the nearest op that the tape hears.
Claimed: ResNet-50 with a batch 4.7 times as large, 3DUnet with one twice as large.

Complexity O(n log n) a candidate, of which there are 20.
"""

from __future__ import annotations

from collections.abc import Iterator

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose, waiting_for_room
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.bells import heard_before

LOWER_BOUNDS = (1, 5, 20, 50, 100)  # the paper's default is 1; its users tune between 1 and 100
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the tensors on long edges, the largest first


@POLICIES.register("tflms", uses=frozenset({Keep, Offload}))
def tflms(step: Prepared, budget: Budget) -> Timeline:
    """Swap the largest tensors on long edges.

    Raises:
        InfeasibleBudgetError: If no choice of the two numbers fits.
    """
    return choose(step, waiting_for_room(step, _plans(step), budget), budget, "tflms")


def _plans(step: Prepared) -> Iterator[Actions]:
    yield {}
    to = largest_link(step.trace)
    if not to:
        return
    inputs = sorted(layer_inputs(step, lambda op: True), key=lambda entry: -entry.n_bytes)
    for bound in LOWER_BOUNDS:
        far = [entry for entry in inputs if entry.needed - entry.read > bound]
        for share in SHARES:
            yield _swapped(step, far[: int(share * len(far))], to, bound)


def _swapped(step: Prepared, inputs: list[LayerInput], to: str, bound: int) -> Actions:
    """Swap-ins are triggered at the nearest tick that is heard at least ``bound`` before the reader."""
    actions: dict[int, Action] = {}
    for entry in inputs:
        back = heard_before(step.trace, entry.needed - bound, entry.needed)
        actions[entry.value] = Offload(to, (), entry.read, -1, back)
    return scheduled(step, actions)
