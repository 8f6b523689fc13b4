"""Tensors on long edges of the graph are swapped out.

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", 2018, arXiv 1807.02037. Its code is
tensorflow/tensorflow pull request 19845.

Reproduced: an edge from an op to one that is more than ``lb`` ops later in topological order gets a swap-out and a
    swap-in. The swap-in is triggered by the nearest op that is at least ``lb`` and at most ``ub`` ops before its reader
    (the strategy "direct order"); where there is none, nothing holds it back once the swap-out is over. Swap-ins of one
    tensor are fused; the first ``n_tensors`` of the forward are taken.
Modelled: distances are ticks of the recorded step, as an eager step has one order. Triggers are the ticks that the tape
    hears, and a swap-in without one is asked for at the first of them. ``lb``, ``ub`` and ``n_tensors``, which its
    users tune by hand, are tried in a few steps, and the simulator chooses. TensorFlow's allocator waits where it has
    no room; here the step waits for transfers (``simulator/room.py``).
Left out: the strategy "chain rule", which counts distances along paths of the forward; branches inside the forward.
Claimed: ResNet-50 with a batch 4.7 times as large, 3DUnet with one twice as large.

Complexity O(n log n) a candidate, of which there are at most 61.
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
from ctdr_lightning.memory.traces.bells import bells_of, heard_before
from ctdr_lightning.memory.traces.trace import Trace

LOWER_BOUNDS = (1, 5, 20, 50, 100)  # the code's default is 1; its users tune between 1 and 100
UPPER_BOUNDS = (10_000, 100, 20, 5)  # the code's default, and three that bind in steps of some hundred ops
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the tensors on long edges, the first of the forward


@POLICIES.register("tflms", uses=frozenset({Keep, Offload}))
def tflms(step: Prepared, budget: Budget) -> Timeline:
    """Swap the first tensors of the forward that are on long edges.

    Raises:
        InfeasibleBudgetError: If no choice of the three numbers fits.
    """
    return choose(step, waiting_for_room(step, _plans(step), budget), budget, "tflms")


def _plans(step: Prepared) -> Iterator[Actions]:
    """The plain step, and every plan that the three numbers give, once."""
    yield {}
    to = largest_link(step.trace)
    inputs = layer_inputs(step, lambda op: True) if to else []
    seen: list[Actions] = []
    for lower in LOWER_BOUNDS:
        far = [entry for entry in inputs if entry.needed - entry.read > lower]
        for upper in UPPER_BOUNDS:
            moves = [_move(step.trace, entry, to, lower, upper) for entry in far if upper >= lower]
            for share in SHARES:
                actions = dict(moves[: int(share * len(moves))])
                if actions and actions not in seen:
                    seen.append(actions)
                    yield scheduled(step, actions)


def _move(trace: Trace, entry: LayerInput, to: str, lower: int, upper: int) -> tuple[int, Action]:
    back = heard_before(trace, entry.needed - lower, entry.needed)
    if entry.needed - back > upper:
        back = min(bells_of(trace))
    return entry.value, Offload(to, (), entry.read, -1, back)
