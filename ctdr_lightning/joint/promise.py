"""The promise of the project: least memory at no more than the dense model's time.

Decomposition makes the step faster, and the saved time may be spent on recomputation. It is measured: each
factorized layer against the dense layer it replaced, at the shapes of the recorded step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

from torch import nn

from ctdr_lightning.decomposition.choose.stopwatch import Job, step_seconds
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.shapes.layer_kinds import is_channels_last, weight_of
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.policies import Budget
from ctdr_lightning.memory.policies.registry import Choose, Policy
from ctdr_lightning.memory.traces.trace import WEIGHT, OpRecord, Trace, ValueRecord


def promise(
    trace: Trace,
    model: nn.Module,
    max_slowdown: float = 1.0,
    policy: str | Policy | Choose = "auto",
) -> Plan:
    """The plan of least peak whose step takes no longer than the dense model's.

    Args:
        trace: A recorded step of the decomposed model.
        model: That model.
        max_slowdown: How long the step may take, in steps of the dense model.
        policy: Name of a registered policy, or a callable.
    """
    limit_s = max(dense_step_seconds(trace, model) * max_slowdown, trace.seconds)
    return plan(trace, Budget(seconds=limit_s), policy)


def dense_step_seconds(trace: Trace, model: nn.Module) -> float:
    """Time of the recorded step with dense layers in the place of the factorized ones.

    Args:
        trace: A recorded step of the model; not a fake one, because its seconds are compared with measured ones.
        model: A model with factorized layers; without any, the answer is the step's own time.

    Returns:
        The measured step, less the factorized layers, plus the dense ones; both micro-benchmarked in turns, once for
        each shape.
    """
    seconds = trace.seconds
    for name, layer in model.named_modules():
        if isinstance(layer, FactorizedLayer):
            for shape in input_shapes(trace, name, layer):
                dense_s, factorized_s = step_seconds(_job(layer, shape))
                seconds += dense_s - factorized_s
    return seconds


def input_shapes(trace: Trace, name: str, layer: FactorizedLayer) -> Iterator[tuple[int, ...]]:
    """Shape of the layer's input at each of its calls in the step."""
    first: OpRecord | None = None
    frozen = {tuple(parameter.shape) for parameter in layer.parameters() if not parameter.requires_grad}
    for index in trace.forward_ops:
        op = trace.ops[index]
        if not (op.module == name or op.module.startswith(f"{name}.")):
            continue
        read = [v for v in map(trace.values.__getitem__, op.inputs) if not _is_weight(v, frozen)]
        if read and (first is None or (op.name, op.module) == (first.name, first.module)):
            first = first or op
            yield _as_input(read[0].shape, layer)


def _is_weight(value: ValueRecord, frozen: Collection[tuple[int, ...]]) -> bool:
    """Whether a value is a layer's own weight: a linear layer transposes it, an embedding reads it first."""
    return value.pin == WEIGHT or (value.op < 0 and value.shape in frozen)


def _as_input(shape: tuple[int, ...], layer: FactorizedLayer) -> tuple[int, ...]:
    """A traced shape, which is the base's where the input was a view, as the layer takes it."""
    geometry = layer.geometry
    if geometry.lookup or (geometry.n_axes and len(shape) == geometry.n_axes + 2):
        return shape
    return (prod(shape) // geometry.in_size, geometry.in_size)


def _job(layer: FactorizedLayer, shape: tuple[int, ...]) -> Job:
    weight = weight_of(layer.factor_layers[0])
    return Job(layer.geometry, layer.method, layer.ranks, shape, weight.dtype, weight.device, is_channels_last(weight))
