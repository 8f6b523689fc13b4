"""Tensors in the order of the forward wait on an SSD.

Bae et al., "FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks", FAST 2021.

Reproduced: linear tensor selection: tensors are marked for the SSD in the order of the forward until the rest fits; if
    the transfers of one pass take longer than its compute, the compression-aware phase writes marked tensors in half
    precision until they do not.
Modelled: whether the rest fits is asked of the simulator. Half precision is bfloat16 here, and only where the user
    allows that codec.
Left out: copies between GPU and SSD that pass the host by; compressed sparse rows, as contents are not looked at.
Claimed: batches 12.4 to 14.0 times as large on a card of 16 GB.

Complexity O(n) simulations, halved by bisection to O(log n).
"""

from __future__ import annotations

from collections.abc import Iterator

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.facts import facts_of

HALF = "bf16"


@POLICIES.register("flashneuron", uses=frozenset({Keep, Offload}), exact=False)
def flashneuron(step: Prepared, budget: Budget) -> Timeline:
    """Move the first tensors of the forward, as many as must go.

    Raises:
        InfeasibleBudgetError: If moving all of them does not fit.
    """
    return choose(step, _plans(step, budget), budget, "flashneuron")


def _plans(step: Prepared, budget: Budget) -> Iterator[Actions]:
    yield {}
    trace = step.trace
    names = [link.to for link in trace.links]
    to = "disk" if "disk" in names else largest_link(trace)
    if not to:
        return
    inputs = layer_inputs(step, lambda op: True)
    inputs.sort(key=lambda entry: entry.value)
    for narrow in (False, True):
        low, high = 0, len(inputs)  # the fewest that fit lie in between
        if budget.peak_bytes is None:
            low = high
        while low < high:
            middle = (low + high) // 2
            simulator = Simulator(step, _marked(step, inputs[:middle], to, narrow=narrow))
            low, high = (low, middle) if simulator.peak_bytes <= (budget.peak_bytes or 0) else (middle + 1, high)
        yield _marked(step, inputs[:low], to, narrow=narrow)
        if not any(cost.name == HALF for cost in trace.codecs):
            return


def _marked(step: Prepared, inputs: list[LayerInput], to: str, *, narrow: bool) -> Actions:
    facts = facts_of(step.trace)
    actions: dict[int, Action] = {}
    for entry in inputs:
        smaller = narrow and "float" in facts[entry.value].kinds and facts[entry.value].item_bytes > 2
        actions[entry.value] = Offload(to, (HALF,) if smaller else ())
    return scheduled(step, actions)
