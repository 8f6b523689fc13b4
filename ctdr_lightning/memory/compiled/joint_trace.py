"""A joint graph as a trace: the compiled step as the planning half sees any other.

A value is a storage, so a view belongs to its base's value. A value of the forward that the backward reads is saved,
once for each call that reads it. What the forward returns, its tangents and the gradients are there to the end, as
whoever called may hold them. Complexity: linear, and one benchmark a distinct call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from ctdr_lightning.basics.devices import model_of
from ctdr_lightning.basics.torch_compiler import is_tangent
from ctdr_lightning.basics.torch_private import OpOverload, tree_leaves
from ctdr_lightning.memory.compiled.joint_graph import Call, JointGraph
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.recorder.workspace import WorkspaceProbe
from ctdr_lightning.memory.traces.trace import OpRecord, Save, StorageRecord, Trace, ValueRecord
from ctdr_lightning.memory.values.op_traits import pin_reason_of_call, pin_reason_on_gpu, traits, without_running_stats

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
    """

    def __init__(self, graph: JointGraph, prices: CallSeconds) -> None:
        self.graph = graph
        self.makers: dict[int, tuple[Call, int]] = {}
        self._by_storage: dict[int, int] = {}
        self._values: list[_Value] = []
        self._saves: dict[int, list[Save]] = defaultdict(list)
        self._ops: list[OpRecord] = []
        self._probe = _probe(graph)
        self._prices = prices
        self._ticks = count()
        self._n_forward = 0
        self._overwritten = {self._storage_key(node) for node in graph.mutated}
        self.trace = self._trace()

    def value_of(self, node: fx.Node) -> int:
        """Id of the value behind a node; -1 for anything but a tensor of the step."""
        made = self.graph.made.get(node)
        return self._value(made) if isinstance(made, Tensor) else -1

    def _value(self, tensor: Tensor) -> int:
        return self._by_storage.get(tensor.untyped_storage()._cdata, -1)

    def _storage_key(self, node: fx.Node) -> int:
        return self.graph.made[node].untyped_storage()._cdata

    def _trace(self) -> Trace:
        graph = self.graph
        forward = [call for call in graph.calls if call.node in graph.forward]
        by_node = {call.node: call for call in graph.calls}
        backward = [by_node[node] for node in graph.backward if node in by_node]
        for node in graph.placeholders:
            if isinstance(graph.made[node], Tensor) and not is_tangent(node):
                self._enter(graph.made[node], INPUT, born=-1)
        self._n_forward = len(forward)
        for call in forward:
            self._run(call)
        last = self._n_forward - 1
        for node in filter(is_tangent, graph.placeholders):
            if isinstance(graph.made[node], Tensor):
                self._enter(graph.made[node], INPUT, born=max(last, 0))
        for call in backward:
            self._ask(call)
            self._run(call, backward=True)
        return self._finished(next(self._ticks))

    def _enter(self, tensor: Tensor, pin: str, born: int, op: int = -1) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._by_storage:
            self._by_storage[storage._cdata] = len(self._values)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._values.append(_Value(storage.nbytes(), tuple(tensor.shape), dtype, op, born, born, pin))
        return self._by_storage[storage._cdata]

    def _ask(self, call: Call) -> None:
        """The backward asks for each value of the forward that its next call reads."""
        asked = [(value, next(self._ticks)) for value in self._read(call) if self._from_forward(value)]
        for value, tick in asked:
            self._saves[value].append(Save(self._ops[self._values[value].op].tick, (tick,), asked[-1][1] + 1))

    def _from_forward(self, value: int) -> bool:
        return 0 <= self._values[value].op < self._n_forward

    def _read(self, call: Call) -> tuple[int, ...]:
        found = (self._value(leaf) for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor))
        return tuple(dict.fromkeys(value for value in found if value >= 0))

    def _run(self, call: Call, *, backward: bool = False) -> None:
        tick, index, inputs = next(self._ticks), len(self._ops), self._read(call)
        pin = "" if backward else self._pin(call)
        outputs = []
        for place, out in enumerate(_results(call.out)):
            value = self._enter(out, pin or _pin_of_result(call, out), tick, index) if out is not None else -1
            if value >= 0 and self._values[value].op == index:
                self.makers[value] = (call, place)
            outputs.append(value)
        for value in (*inputs, *outputs):
            if value >= 0 and not (backward and self._from_forward(value)):
                self._values[value].end = max(self._values[value].end, tick)
        seconds = 0.0
        if isinstance(call.node.target, OpOverload):
            seconds = self._prices.seconds(call.node.target, call.args, call.kwargs, call.out)
            self._probe.note(index, call.node.target, call.args, call.kwargs)
        name = traits(call.node.target).name
        self._ops.append(OpRecord(name, tick, inputs, tuple(outputs), seconds, 0, _module(call.node), backward, pin))

    def _pin(self, call: Call) -> str:
        """Why a call of the forward may not run again in the backward, or the empty string."""
        target = call.node.target
        if not isinstance(target, OpOverload):
            return "higher-order operator"
        args = without_running_stats(target, call.args, call.kwargs) if traits(target).batch_norm else call.args
        read = {t.untyped_storage()._cdata for t in tree_leaves((args, call.kwargs)) if isinstance(t, Tensor)}
        if not read.isdisjoint(self._overwritten) and not traits(target).view:
            return OVERWRITTEN
        return pin_reason_of_call(target, call.args, call.kwargs)

    def _finished(self, n_ticks: int) -> Trace:
        graph = self.graph
        for node in (*graph.forward_outputs, *graph.backward_outputs, *filter(is_tangent, graph.placeholders)):
            value = self.value_of(node)
            if value >= 0 and self._values[value].born >= 0:
                self._values[value].end = n_ticks - 1
        temps = self._probe.measure()
        ops = [op if i not in temps else replace(op, temp_bytes=temps[i]) for i, op in enumerate(self._ops)]
        values = [
            ValueRecord(i, v.op, v.shape, v.dtype, n_ticks, tuple(self._saves[i]), v.pin)
            for i, v in enumerate(self._values)
        ]
        storages = [StorageRecord(v.n_bytes, v.born, v.end) for v in self._values]
        resident = sum(v.n_bytes for v in self._values if v.born < 0)
        device = _device(graph).type
        meta = {"torch": str(torch.__version__), "compiled": "joint graph"}
        return Trace(tuple(ops), tuple(values), tuple(storages), n_ticks, device, resident, meta)


def _probe(graph: JointGraph) -> WorkspaceProbe:
    device = _device(graph)
    gpu = model_of(device) if device.type == "cuda" else None
    return WorkspaceProbe(fake=True, other=gpu.name if gpu else "", gpu=gpu)


def _device(graph: JointGraph) -> torch.device:
    devices = [t.device for t in map(graph.made.get, graph.placeholders) if isinstance(t, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _results(out: Any) -> list[Tensor | None]:
    several = out if isinstance(out, (tuple, list)) else (out,)
    return [result if isinstance(result, Tensor) else None for result in several]


def _pin_of_result(call: Call, out: Tensor) -> str:
    if out.device.type != "cuda" or not isinstance(call.node.target, OpOverload):
        return ""
    return pin_reason_on_gpu(call.node.target, call.args, out)


def _module(node: fx.Node) -> str:
    """Path of the module that a node comes from, as its model names it."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path.removeprefix("L['self'].").removeprefix("L['self']")
