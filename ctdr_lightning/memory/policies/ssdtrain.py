"""As much of the forward goes to the SSD as it can take in that time.

Wu et al., "SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language Model Training", 2024, arXiv
2408.10013.

Reproduced: activations are offloaded in the order of the forward, weights never, and no more than the drive can write
    while the forward runs, so that the step does not wait for writes; the saves of the last module stay, because its
    backward comes at once; small tensors stay; prefetches are asked for in the reverse order, as early as hides them.
Modelled: a tensor that the backward asks for while it is still being written (which the system forwards from memory)
    simply stays.
Left out: deduplication of tensors that are saved twice, which the trace has done; GPUDirect storage.
Claimed: 47 % less memory for activations at the peak, at negligible overhead.

Complexity O(n log n).
"""

from __future__ import annotations

from collections.abc import Iterator

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.layered import largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.away import link_to
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.timeline import Timeline

LEAST_BYTES = 2**20 * 4  # the system's own: tensors of fewer than 2^20 elements stay
# The system tunes how much of the writable amount it offloads to the step's other traffic.
SHARES = (1.0, 0.75, 0.5)


@POLICIES.register("ssdtrain", uses=frozenset({Keep, Offload}))
def ssdtrain(step: Prepared, budget: Budget) -> Timeline:
    """Offload as much as can be written behind the forward.

    Raises:
        InfeasibleBudgetError: If that does not fit.
    """
    return choose(step, _plans(step), budget, "ssdtrain")


def _plans(step: Prepared) -> Iterator[Actions]:
    yield {}
    trace = step.trace
    names = [link.to for link in trace.links]
    to = "disk" if "disk" in names else largest_link(trace)
    for share in SHARES if to else ():
        yield scheduled(step, _written(step, to, share))


def _written(step: Prepared, to: str, share: float) -> dict[int, Action]:
    trace = step.trace
    forward_s = sum(trace.ops[index].seconds for index in trace.forward_ops)
    inputs = layer_inputs(step, lambda op: True)
    # Small nets have no tensor of that size; there a hundredth of the largest counts as small.
    least = min(LEAST_BYTES, max((e.n_bytes for e in inputs), default=0) // 100)
    last = trace.module_of(inputs[-1].value) if inputs else ""
    left_s, found = share * forward_s, dict[int, Action]()
    for entry in inputs:
        seconds = link_to(trace, to).seconds(entry.n_bytes)[0]
        if entry.n_bytes >= least and trace.module_of(entry.value) != last and seconds <= left_s:
            found[entry.value] = Offload(to)
            left_s -= seconds
    return found
