"""Layer inputs wait in host memory, their zeros left out on the way.

Rhu et al., "Compressing DMA Engine: Leveraging Activation Sparsity for Training Deep Neural Networks", HPCA 2018, arXiv
1705.01626.

Reproduced: vDNN's transfers of the inputs of every layer or of convolutions, each written as a mask of a bit an element
    and the elements that are not zero (zero-value compression), wherever a ReLU made the tensor or max-pooling after
    one, however many zeros it has.
Modelled: the paper compresses in the DMA engine at no cost; here the codec runs on the device, and its time counts.
    Sizes are foretold from the zeros of the recorded step, with 10 % more elements than these leave, and anew where
    training changes them by more. Where nobody counted them (fake tensors, named devices), tensors count as dense.
    Without the codec ``zvc`` the plans are vDNN's.
Left out: the engine's buffers; the paper's other codecs, run lengths and zlib.
Claimed: transfers 2.6 times smaller on average, which makes virtualized training 32 % faster.

Complexity O(n log n).
"""

from __future__ import annotations

from dataclasses import replace

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.policies.vdnn import moved
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.simulator.actions import Actions, Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.trace import Trace

ZERO_VALUE = "zvc"


@POLICIES.register("cdma", uses=frozenset({Keep, Offload}))
def cdma(step: Prepared, budget: Budget) -> Timeline:
    """Move nothing, or the inputs of convolutions, or those of all layers, compressed: the fastest that fits.

    Raises:
        InfeasibleBudgetError: If none fits.
    """
    plans = [moved(step, convolutions_alone=alone) for alone in (True, False)]
    return choose(step, [{}, *(_without_zeros(step.trace, plan) for plan in plans)], budget, "cdma")


def _without_zeros(trace: Trace, actions: Actions) -> Actions:
    if not any(cost.name == ZERO_VALUE for cost in trace.codecs):
        return actions
    facts = facts_of(trace)
    return {
        v: replace(a, codecs=(ZERO_VALUE,)) if isinstance(a, Offload) and "zeros" in facts[v].kinds else a
        for v, a in actions.items()
    }
