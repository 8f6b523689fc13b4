"""A joint graph as a trace: the compiled step as the planning half sees any other.

A value is a storage, so a view belongs to its base's value. A value of the forward that the backward reads is saved,
once for each call that reads it. What the forward returns, its tangents and the gradients are there to the end, as
whoever called may hold them. Complexity: linear, and one benchmark a distinct call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from ctdr_lightning.basics.devices import model_of
from ctdr_lightning.basics.torch_compiler import WORKSPACE, is_tangent, is_weight_or_input
from ctdr_lightning.basics.torch_private import OpOverload, tree_leaves
from ctdr_lightning.memory.compiled.joint_graph import Call, JointGraph, is_fusible, is_pointwise
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.recorder.workspace import PRODUCTS, WorkspaceProbe
from ctdr_lightning.memory.traces.trace import OpRecord, Save, StorageRecord, Trace, ValueRecord
from ctdr_lightning.memory.values.op_traits import pin_reason_of_call, pin_reason_on_gpu, traits, without_running_stats

# A pointwise call inside of another kernel costs its arithmetic, not its passes over memory. By its time alone the plan
# of a transformer at 0.7 took x1.17 of plain inductor's step, by a tenth of it x1.02. Not tuned further.
_FUSED_SHARE = 0.1
INPUT = "an input of the graph"
OVERWRITTEN = "reads an input that the step overwrites"


@dataclass
class _Value:
    """One storage of the step, while the trace is made."""

    n_bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: int = -1
    born: int = -1
    end: int = -1
    pin: str = ""


class JointTrace:
    """The trace of a joint graph, with the way back from its values to the graph's nodes.

    Args:
        graph: The joint graph.
        prices: Where seconds of calls come from.

    Attributes:
        graph: The joint graph.
        trace: The step as data.
        makers: From value to the call that makes it and the value's place among its results.
        caller_bytes: Bytes of the forward's results and of its tangents, which whoever called may hold to the end.
    """

    def __init__(self, graph: JointGraph, prices: CallSeconds, *, fused: bool = False) -> None:
        self.graph = graph
        self._fused = fused
        self.makers: dict[int, tuple[Call, int]] = {}
        self._by_storage: dict[int, int] = {}
        self._values: list[_Value] = []
        self._saves: dict[int, list[Save]] = defaultdict(list)
        self._ops: list[OpRecord] = []
        self._first: list[fx.Node] = []  # of each op
        self._probe = _probe(graph)
        self._prices = prices
        self._ticks = count()
        self._n_forward = 0
        self.caller_bytes = 0
        self._overwritten = {_storage(graph.made[node]) for node in graph.mutated}
        self.trace = self._trace()

    def value_of(self, node: fx.Node) -> int:
        """Id of the value behind a node; -1 for anything but a tensor of the step."""
        made = self.graph.made.get(node)
        return self._value(made) if isinstance(made, Tensor) else -1

    def bytes_of_inputs(self, places: Collection[int]) -> int:
        """Bytes of some weights and inputs.

        Args:
            places: Their places among all of them.
        """
        inputs = [node for node in self.graph.placeholders if is_weight_or_input(node)]
        values = {self.value_of(inputs[place]) for place in places}
        return sum(self._values[value].n_bytes for value in values if value >= 0)

    def _value(self, tensor: Tensor) -> int:
        return self._by_storage.get(_storage(tensor), -1)

    def _trace(self) -> Trace:
        graph = self.graph
        by_node = {call.node: call for call in graph.calls}
        forward = [call for call in graph.calls if call.node in graph.forward]
        kernels = ([by_node[node] for node in kernel if node in by_node] for kernel in graph.backward)
        backward = [kernel for kernel in kernels if kernel]
        self._n_forward = len(forward)
        for node in graph.placeholders:
            if isinstance(graph.made[node], Tensor) and not is_tangent(node):
                self._enter(graph.made[node], INPUT, born=-1)
        for call in forward:
            self._run([call])
        for node in filter(is_tangent, graph.placeholders):
            if isinstance(graph.made[node], Tensor):
                self._enter(graph.made[node], INPUT, born=max(self._n_forward - 1, 0))
        inside = self._inside(backward)
        for kernel in backward:
            self._ask(kernel)
            self._run(kernel, inside)
        return self._finished(next(self._ticks))

    def _inside(self, kernels: list[list[Call]]) -> set[int]:
        """Storages that no one outside of a kernel reads: a compiler does not write them down."""
        several = [(place, kernel) for place, kernel in enumerate(kernels) if len(kernel) > 1]
        outputs = [(out, place) for place, kernel in reversed(several) for call in kernel for out in _results(call.out)]
        made = {_storage(out): place for out, place in outputs if out is not None}  # by the first of several
        read = {_storage(self.graph.made[node]) for node in self.graph.backward_outputs}
        for place, kernel in enumerate(kernels):
            read.update(s for call in kernel for s in map(_storage, _tensors(call)) if made.get(s, place) != place)
        return made.keys() - read

    def _enter(self, tensor: Tensor, pin: str, born: int, op: int = -1) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._by_storage:
            self._by_storage[storage._cdata] = len(self._values)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._values.append(_Value(storage.nbytes(), tuple(tensor.shape), dtype, op, born, born, pin))
        return self._by_storage[storage._cdata]

    def _ask(self, kernel: list[Call]) -> None:
        """The backward asks for each value of the forward that its next kernel reads."""
        asked = [
            (value, next(self._ticks)) for value in self._read(kernel) if 0 <= self._values[value].op < self._n_forward
        ]
        for value, tick in asked:
            self._saves[value].append(Save(self._ops[self._values[value].op].tick, (tick,), asked[-1][1] + 1))

    def _read(self, kernel: list[Call]) -> tuple[int, ...]:
        found = (self._value(tensor) for call in kernel for tensor in _tensors(call))
        return tuple(dict.fromkeys(value for value in found if value >= 0))

    def _run(self, kernel: list[Call], inside: Collection[int] = ()) -> None:
        """Enter a kernel as one op: a call of the forward, or one or more of the backward."""
        tick, index, inputs = next(self._ticks), len(self._ops), self._read(kernel)
        backward = index >= self._n_forward
        pin = "" if backward else self._pin(kernel[0])
        outputs = [value for call in kernel for value in self._results(call, tick, index, pin, inside)]
        for value in (*inputs, *outputs):
            if value >= 0 and not (backward and 0 <= self._values[value].op < self._n_forward):
                self._values[value].end = max(self._values[value].end, tick)
        seconds = sum(self._seconds(index, call) for call in kernel)
        first, module = kernel[0].node, _module(kernel[0].node)
        target: Any = first.target
        name = traits(target).name
        self._first.append(first)
        self._ops.append(OpRecord(name, tick, inputs, tuple(outputs), seconds, 0, module, backward, pin))

    def _results(self, call: Call, tick: int, index: int, pin: str, inside: Collection[int]) -> list[int]:
        found = []
        for place, out in enumerate(_results(call.out)):
            if out is None or _storage(out) in inside:
                found.append(-1)
                continue
            value = self._enter(out, pin or _pin_of_result(call, out), tick, index)
            if self._values[value].op == index:
                self.makers.setdefault(value, (call, place))
            found.append(value)
        return found

    def _seconds(self, index: int, call: Call) -> float:
        target = call.node.target
        if not isinstance(target, OpOverload):
            return 0.0
        # inductor writes fusible kernels itself, and makes the operands of products readable for BLAS
        if not self._fused or not (is_fusible(call.node) or traits(target).name in PRODUCTS):
            self._probe.note(index, target, call.args, call.kwargs)
        seconds = self._prices.seconds(target, call.args, call.kwargs, call.out)
        return seconds * _FUSED_SHARE if self._fused and is_pointwise(call.node) else seconds

    def _pin(self, call: Call) -> str:
        """Why a call of the forward may not run again in the backward, or the empty string."""
        target = call.node.target
        if not isinstance(target, OpOverload):
            return "higher-order operator"
        args = without_running_stats(target, call.args, call.kwargs) if traits(target).batch_norm else call.args
        read = {_storage(t) for t in tree_leaves((args, call.kwargs)) if isinstance(t, Tensor)}
        if not read.isdisjoint(self._overwritten) and not traits(target).view:
            return OVERWRITTEN
        return pin_reason_of_call(target, call.args, call.kwargs)

    def _made_of(self, *nodes: fx.Node) -> set[int]:
        """The values behind some nodes, apart from inputs."""
        return {value for value in map(self.value_of, nodes) if value >= 0 and self._values[value].born >= 0}

    def _finished(self, n_ticks: int) -> Trace:
        graph = self.graph
        callers = self._made_of(*graph.forward_outputs, *filter(is_tangent, graph.placeholders))
        for value in callers | self._made_of(*graph.backward_outputs):
            self._values[value].end = n_ticks - 1
        self.caller_bytes = sum(self._values[value].n_bytes for value in callers)
        temps = self._probe.measure()
        for index, n_bytes in temps.items():
            self._ops[index] = replace(self._ops[index], temp_bytes=n_bytes)
            self._first[index].meta[WORKSPACE] = n_bytes
        values = [
            ValueRecord(i, v.op, v.shape, v.dtype, n_ticks, tuple(self._saves[i]), v.pin)
            for i, v in enumerate(self._values)
        ]
        storages = [StorageRecord(v.n_bytes, v.born, v.end) for v in self._values]
        resident = sum(v.n_bytes for v in self._values if v.born < 0)
        device = _device(graph).type
        meta = {"torch": str(torch.__version__), "compiled": "joint graph"}
        return Trace(tuple(self._ops), tuple(values), tuple(storages), n_ticks, device, resident, meta)


def _probe(graph: JointGraph) -> WorkspaceProbe:
    device = _device(graph)
    gpu = model_of(device) if device.type == "cuda" else None
    return WorkspaceProbe(fake=True, other=gpu.name if gpu else "", gpu=gpu)


def _device(graph: JointGraph) -> torch.device:
    devices = [t.device for t in map(graph.made.get, graph.placeholders) if isinstance(t, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(call: Call) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]


def _results(out: Any) -> list[Tensor | None]:
    several = out if isinstance(out, (tuple, list)) else (out,)
    return [result if isinstance(result, Tensor) else None for result in several]


def _pin_of_result(call: Call, out: Tensor) -> str:
    if out.device.type != "cuda" or not isinstance(call.node.target, OpOverload):
        return ""
    return pin_reason_on_gpu(call.node.target, call.args, out)


def _module(node: fx.Node) -> str:
    """Path of the module that a node comes from, without the local or global name of its model."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path.partition("]")[2].lstrip(".") if path.startswith(("L[", "G[")) else path
