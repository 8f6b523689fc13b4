"""Values as layer-wise systems see them: the input of each layer, when it is read and when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.trace import OpRecord, Trace


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A saved value that a layer reads.

    Attributes:
        value: Its id.
        read: Tick of the last forward op that reads it, the layer's.
        needed: First tick at which the backward needs it after the program has let go of it.
        n_bytes: Size of its allocation.
    """

    value: int
    read: int
    needed: int
    n_bytes: int


def layer_inputs(step: Prepared, is_layer: Callable[[OpRecord], bool]) -> list[LayerInput]:
    """The saved values that can be moved and that a layer's forward reads, in the order of the forward."""
    trace = step.trace
    read: dict[int, int] = {}
    chosen: set[int] = set()
    for index in trace.forward_ops:
        op = trace.ops[index]
        for value in op.inputs:
            read[value] = op.tick
            if is_layer(op):
                chosen.add(value)
    simulator, facts = Simulator(step), facts_of(trace)
    found = []
    for value in sorted(chosen):
        needed = simulator.needed(value)[0] if facts[value].movable else None
        if needed is not None:
            found.append(LayerInput(value, read[value], needed, trace.value_bytes(value)))
    return sorted(found, key=lambda entry: entry.read)


def largest_link(trace: Trace) -> str:
    """The holder that most bytes a second reach; empty where the trace has no link."""
    return max(trace.links, key=lambda link: link.out_bytes_per_s).to if trace.links else ""
