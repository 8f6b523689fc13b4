"""Tensors that are needed last are swapped out first, and swapped in as soon as there is room.

Huang, Jin, Li, "SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping", ASPLOS 2020.

Reproduced: its swap planner: wherever the step has no room, the tensor with the farthest next use goes (Belady's rule);
    it is swapped in as soon as there is room for it, the first needed first. The step waits for both where it must.
Modelled: room is the budget, asked of the simulated bytes at each tick. A tensor leaves once, after its last read of
    the forward.
Left out: the genetic search over orders of ops and over pools of size classes: an eager step has one order, and
    PyTorch's allocator the pools. What is left to search is which tensors the planner may swap. A genetic search over
    that (100 simulated plans) made two of five nets up to 1.7 % faster and three not at all, and a random search did
    nearly as well: docs/developer/planning.md has the figures.
Claimed: nets of up to 12 times the memory at 53 to 99 % of the throughput that unlimited memory gives.

Complexity O(n log n + n t) for t ticks.
"""

from __future__ import annotations

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.belady import swapped
from ctdr_lightning.memory.search.best_candidate import choose, waiting_for_room
from ctdr_lightning.memory.simulator.actions import Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.timeline import Timeline

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
    plans = [swapped(step, limit, {}) for limit in limits] if trace.links else []
    return choose(step, waiting_for_room(step, [{}, *plans], budget), budget, "swapadvisor")
