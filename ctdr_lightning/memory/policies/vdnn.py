"""Layer inputs wait in host memory.

Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design", MICRO 2016,
arXiv 1602.08124.

Reproduced: ``vdnn_all`` moves the input of every layer, ``vdnn_conv`` that of convolutions alone; a transfer is issued
    with the layer's forward, and the step waits for it at the layer's end; on the way back the layer before a
    convolution is prefetched while that convolution's backward runs, one convolution ahead. ``vdnn`` (dyn) keeps all if
    that fits, else moves convolutions' inputs, else every layer's.
Modelled: a layer is an op that reads a saved value.
Left out: the choice of convolution algorithms by workspace, which PyTorch makes.
Claimed: 89 to 95 % less memory (AlexNet, OverFeat, GoogLeNet); VGG-16 at batch 256 on 12 GB, 18 % slower.

Complexity O(n log n).
"""

from __future__ import annotations

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.layered import largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Actions, Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.bells import heard_before
from ctdr_lightning.memory.traces.op_kinds import is_convolution


@POLICIES.register("vdnn_all", uses=frozenset({Keep, Offload}))
def vdnn_all(step: Prepared, budget: Budget) -> Timeline:
    """Move the input of every layer.

    Raises:
        InfeasibleBudgetError: If that does not fit.
    """
    return choose(step, [moved(step, convolutions_alone=False)], budget, "vdnn_all")


@POLICIES.register("vdnn_conv", uses=frozenset({Keep, Offload}))
def vdnn_conv(step: Prepared, budget: Budget) -> Timeline:
    """Move the inputs of convolutions.

    Raises:
        InfeasibleBudgetError: If that does not fit.
    """
    return choose(step, [moved(step, convolutions_alone=True)], budget, "vdnn_conv")


@POLICIES.register("vdnn", uses=frozenset({Keep, Offload}))
def vdnn(step: Prepared, budget: Budget) -> Timeline:
    """Move nothing, or the inputs of convolutions, or those of all layers: the fastest that fits.

    Raises:
        InfeasibleBudgetError: If none fits.
    """
    plans: list[Actions] = [{}, moved(step, convolutions_alone=True), moved(step, convolutions_alone=False)]
    return choose(step, plans, budget, "vdnn")


def moved(step: Prepared, *, convolutions_alone: bool) -> Actions:
    """The moves of vDNN, with their ticks: waited for at the layer's end, asked back one convolution ahead."""
    to = largest_link(step.trace)
    if not to:
        return {}
    inputs = layer_inputs(step, is_convolution if convolutions_alone else lambda op: True)
    hiding = sorted(entry.needed for entry in layer_inputs(step, is_convolution)) or sorted(e.needed for e in inputs)
    actions = {}
    for entry in inputs:
        ahead = max((tick for tick in hiding if tick < entry.needed), default=entry.needed)
        actions[entry.value] = Offload(to, (), entry.read, entry.read, heard_before(step.trace, ahead, entry.needed))
    return actions
