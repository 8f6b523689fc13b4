"""The memory balance of one layer: savings in state, additional activations, and the change in time.

Decomposition stores the activations between its small layers. Weights, gradients and optimizer state must shrink by
more than that, at the layer's real input size, or the step's memory rises: early layers at high resolution often
lose, late ones win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ctdr_lightning.basics.devices import DeviceModel, model_of, product_flops32_per_s
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.choose.stopwatch import Job, step_seconds
from ctdr_lightning.decomposition.methods import Candidate, KeepDenseError
from ctdr_lightning.decomposition.methods.base import FactorCost
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import is_channels_last, weight_of

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
NOT_CALLED = "its forward is not called: the weight is read directly, or the layer is not used"
_TOLERANCE = 1.05
_LINEAR_AXES = 2  # a weight of more belongs to a convolution, which cuDNN runs
_PASSES = 3
# Operations and bytes per second of one core of an AMD EPYC, as measured four times: 0.83 to 1.05e11 and 2.0 to 2.3e10.
# A fixed one, because ranks that are chosen by measured rates are others in the next run.
_PROCESSOR = DeviceModel("cpu", 1e11, 5e10, 2e10, 4e-6)


@dataclass(frozen=True)
class CostModel:
    """The assumptions under which memory and time are weighed.

    Args:
        optimizer: Key of ``OPTIMIZER_STATES``: how many numbers it keeps a weight.
        recompute: Whether the activations inside a factorized layer will be recomputed: they then cost time, not
            memory.
        measure: Whether a factorization must also run faster in a micro-benchmark.
        gates: Whether a factorization that needs more memory, or more time, is refused where shapes are known.
    """

    optimizer: str = "adam"
    recompute: bool = False
    measure: bool = True
    gates: bool = True

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_STATES:
            names = ", ".join(OPTIMIZER_STATES)
            raise ConfigError(f"optimizer={self.optimizer!r} is not known.", f"Valid names: {names}.")

    def state_bytes(self, layer: Layer, n_weights: int) -> int:
        """Bytes of weights, and where they train of gradients and optimizer state."""
        weight = weight_of(layer.module)
        copies = 2 + OPTIMIZER_STATES[self.optimizer] if weight.requires_grad else 1
        return n_weights * weight.element_size() * copies


@dataclass(frozen=True)
class Weighing:
    """One factorization at the layer's real input shapes, one step.

    Args:
        state_saved_bytes: Weights, gradients and optimizer state no longer needed.
        activations_added_bytes: Stored between the small layers; 0 where they are recomputed.
        flops_before: Operations of the forward, dense.
        flops_after: The same, factorized.
    """

    state_saved_bytes: int
    activations_added_bytes: int
    flops_before: int
    flops_after: int

    @property
    def net_bytes(self) -> int:
        """Change of the memory of a step; negative is less."""
        return self.activations_added_bytes - self.state_saved_bytes


def samples(geometry: Geometry, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Number of samples, and the sizes of one that count: spatial for convolutions, leading for the others."""
    if not geometry.kernel:
        return 1, tuple(shape if geometry.lookup else shape[:-1])
    n_samples = shape[0] if len(shape) == geometry.n_axes + 2 else 1
    return n_samples, tuple(shape[-geometry.n_axes :])


def factor_costs(geometry: Geometry, candidate: Candidate | None, shape: Sequence[int]) -> list[FactorCost]:
    """Cost of each factor on a whole input; of the dense layer as one factor where there is no candidate."""
    n_samples, axes = samples(geometry, shape)
    if candidate is None:
        outputs = geometry.out_size * math.prod(geometry.output_axes(axes))
        each = [FactorCost(geometry.flops(axes), outputs, geometry.n_weights)]
    else:
        each = candidate.method.costs(geometry, candidate.ranks, axes)
    return [FactorCost(cost.flops * n_samples, cost.outputs * n_samples, cost.weights) for cost in each]


def weigh(layer: Layer, candidate: Candidate, costs: CostModel) -> Weighing:
    """Weigh one factorization at the shapes the layer was called with."""
    assert layer.geometry is not None
    n_before, n_after, n_stored = 0, 0, 0
    for shape in layer.calls or ():
        n_samples, axes = samples(layer.geometry, shape)
        n_before += factor_costs(layer.geometry, None, shape)[0].flops
        n_after += sum(factor.flops for factor in factor_costs(layer.geometry, candidate, shape))
        n_stored += candidate.method.n_stored(layer.geometry, candidate.ranks, axes) * n_samples
    weight = weight_of(layer.module)
    stored = 0 if costs.recompute or not weight.requires_grad else n_stored * weight.element_size()
    saved = costs.state_bytes(layer, layer.geometry.n_weights - candidate.parameters)
    return Weighing(saved, stored, n_before, n_after)


def check_pays(layer: Layer, candidate: Candidate, costs: CostModel) -> None:
    """Let a factorization through that saves memory and, where asked, time.

    Raises:
        KeepDenseError: With its costs.
    """
    if layer.calls is None or not costs.gates:
        return
    if not layer.calls:
        raise KeepDenseError(NOT_CALLED)
    found = weigh(layer, candidate, costs)
    if found.net_bytes > 0:
        added, saved = format_bytes(found.activations_added_bytes), format_bytes(found.state_saved_bytes)
        raise KeepDenseError(f"{candidate.method.name} would add {added} of activations and save {saved} of state")
    if costs.measure:
        check_faster(layer, candidate, costs)


def check_faster(layer: Layer, candidate: Candidate, costs: CostModel) -> None:
    """Let a factorization through that a micro-benchmark finds no slower than the dense layer.

    Raises:
        KeepDenseError: Saying how much longer it takes.
    """
    assert layer.geometry is not None
    weight = weight_of(layer.module)
    layout = is_channels_last(weight)
    before_s = after_s = 0.0
    for shape in layer.calls or ():
        job = Job(layer.geometry, candidate.method.name, candidate.ranks, shape, weight.dtype, weight.device, layout)
        dense_s, factorized_s = step_seconds(job)
        before_s, after_s = before_s + dense_s, after_s + factorized_s
    if costs.recompute:
        after_s *= 1 + 1 / _PASSES
    if after_s > _TOLERANCE * before_s:
        raise KeepDenseError(
            f"{candidate.method.name} runs {after_s / before_s:.2f} times as long as the dense layer here"
        )


def predicted_seconds(layer: Layer, candidate: Candidate | None) -> float:
    """Forward and backward of one step by the roofline of the layer's GPU, or of a processor like others."""
    assert layer.geometry is not None
    weight = weight_of(layer.module)
    device = model_of(weight.device) if weight.is_cuda else _PROCESSOR
    whole = product_flops32_per_s(device, by_cudnn=weight.dim() > _LINEAR_AXES)
    rate = device.flops16_per_s if weight.element_size() <= 2 else whole
    seconds = 0.0
    for shape in layer.calls or ():
        n_inputs = math.prod(shape)
        for factor in factor_costs(layer.geometry, candidate, shape):
            moved = (n_inputs + factor.outputs + factor.weights) * weight.element_size()
            seconds += _PASSES * max(device.launch_s, factor.flops / rate, moved / device.bytes_per_s)
            n_inputs = factor.outputs
    return seconds
