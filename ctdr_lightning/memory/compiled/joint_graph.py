"""A joint graph of AOTAutograd: which nodes the forward runs, and what each of them makes, on fake tensors.

The graph is played once on fresh fake tensors of the sizes that it was traced with. Storages then tell which nodes are
views of which others; the values that passes of the compiler leave in a graph's notes need not. Complexity: linear.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_compiler import is_tangent, size_hint
from ctdr_lightning.basics.torch_private import (
    FakeTensorMode,
    OpOverload,
    no_dispatch_modes,
    tree_leaves,
)
from ctdr_lightning.memory.values.op_traits import traits

_MUTATED = "InputMutationAOTOutput"  # how torch describes an output that is written back to an input


@dataclass(frozen=True)
class Call:
    """One call of a joint graph.

    Attributes:
        node: Its node.
        args: Its arguments, fake tensors among them.
        kwargs: Its keyword arguments.
        out: Its result.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class JointGraph:
    """The nodes of a joint graph, and the tensors that they make.

    Args:
        module: The joint graph.
        n_forward_outputs: How many of its outputs the forward returns.
        fused: Whether a compiler makes one kernel of neighbouring pointwise calls.

    Raises:
        ConfigError: If it writes to anything but its inputs.

    Attributes:
        module: The joint graph.
        n_forward_outputs: How many of its outputs the forward returns.
        placeholders: Its inputs: weights, buffers and the batch, then tangents.
        calls: Its calls of operators, in order; sizes and parts of results are none.
        forward: The nodes that the forward runs.
        backward: The nodes that the backward runs, in order, those of one kernel together. Those that need no tangent
            come right before the first that reads them; their views are in neither, as they are made wherever they are
            read.
        forward_outputs: The nodes that it returns, then
        backward_outputs: the gradients.
        made: From node to what it makes: a fake tensor, several, or anything else.
        fakes: The mode of these tensors.
        mutated: Inputs that are written over when the forward is over.
        symbolic: Whether some sizes are not fixed.
    """

    def __init__(self, module: fx.GraphModule, n_forward_outputs: int, *, fused: bool = False) -> None:
        self.module = module
        self.n_forward_outputs = n_forward_outputs
        nodes = list(module.graph.nodes)
        (output,) = (node for node in nodes if node.op == "output")
        returned = tree_leaves(output.args)
        self.forward_outputs, self.backward_outputs = (
            [node for node in part if isinstance(node, fx.Node)]
            for part in (returned[:n_forward_outputs], returned[n_forward_outputs:])
        )
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        needed = _ancestors([*self.forward_outputs, *filter(_only_in_forward, nodes)])
        self.forward = needed | {node for node in nodes if _is_part(node) and node.args[0] in needed}
        self.backward = _kernels(self._backward(nodes), fused=fused)
        self.mutated: set[Any] = {node.args[0] for node in nodes if _writes(node)}
        if not self.mutated.issubset(self.placeholders):
            raise ConfigError("A compiled graph writes in place to a tensor that it has made.", "Compile less.")
        self.mutated |= self._written_back(output, n_forward_outputs)
        self.symbolic = any(_is_symbolic(node.meta.get("val")) for node in self.placeholders)
        self.calls: list[Call] = []
        self.made: dict[fx.Node, Any] = {}
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with no_dispatch_modes(), torch.no_grad():
            self._play(self.fakes)

    def _backward(self, nodes: list[fx.Node]) -> tuple[fx.Node, ...]:
        found: dict[fx.Node, None] = {}
        late = _descendants(nodes)
        for node in nodes:
            if node in late:
                self._add(node, found)
        for node in self.backward_outputs:
            self._add(node, found)
        return tuple(found)

    def _add(self, node: fx.Node, found: dict[fx.Node, None]) -> None:
        """Add a node of the backward behind whatever it needs."""
        stack = [(node, False)]
        while stack:
            node, ready = stack.pop()
            if node in found or node in self.forward or node.op == "placeholder":
                continue
            if not ready:
                stack.append((node, True))
                stack.extend((source, False) for source in reversed(node.all_input_nodes))
            elif not is_light(node) or any(source in found for source in node.all_input_nodes):
                found[node] = None

    def _written_back(self, output: fx.Node, n_forward_outputs: int) -> set[Any]:
        if "desc" not in output.meta:
            raise ConfigError("A compiled graph does not say what it writes back to its inputs.", "Compile less.")
        kinds = tree_leaves(output.meta["desc"])[:n_forward_outputs]
        written = [kind.mutated_input for kind in kinds if type(kind).__name__ == _MUTATED]
        found = {node for node in self.placeholders if node.meta.get("desc") in written}
        if len(found) < len(written):
            raise ConfigError("A compiled graph writes to an input that its notes do not name.", "Compile less.")
        return found

    def _play(self, mode: FakeTensorMode) -> None:
        sources: dict[int, Tensor] = {}
        with mode:
            for node in self.module.graph.nodes:
                if node.op == "placeholder":
                    self.made[node] = _made_anew(node.meta.get("val"), sources)
                elif node.op == "get_attr":
                    found = operator.attrgetter(node.target)(self.module)
                    self.made[node] = mode.from_tensor(found) if type(found) is Tensor else found
                elif node.op == "call_function":
                    self._call(node)

    def _call(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.made.__getitem__)
        assert callable(node.target)
        out = self.made[node] = node.target(*args, **kwargs)
        if node.target is not operator.getitem and any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            self.calls.append(Call(node, args, kwargs, out))


def _only_in_forward(node: fx.Node) -> bool:
    """Whether a node has an effect that belongs to the forward: it writes to an input."""
    tag = node.meta.get("partitioner_tag")
    if tag in ("must_be_in_forward", "must_be_in_backward"):
        return bool(tag == "must_be_in_forward")
    return tag != "is_backward" and _writes(node)


def _writes(node: fx.Node) -> bool:
    """Whether a node writes in place: graphs are functional but for what goes back to their inputs at the end."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def is_light(node: fx.Node) -> bool:
    """Whether a node is made again for nothing: a view, one of several views, or an attribute of the graph."""
    if _is_part(node):
        return is_light(node.all_input_nodes[0])
    return node.op == "get_attr" or (isinstance(node.target, OpOverload) and traits(node.target).view)


# These cost no pass of their own inside of another kernel, although torch does not call them pointwise.
_LIKE_POINTWISE = {"_to_copy", "cat", "clone", "constant_pad_nd", "convert_element_type", "copy", "full", "where"}
_REDUCTIONS = {"all", "amax", "amin", "any", "argmax", "argmin", "mean", "prod", "sum", "var", "var_mean"}


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call makes each element of one element of each operand, so that it fuses with those that read it."""
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or _short(target) in _LIKE_POINTWISE)


def _short(target: OpOverload) -> str:
    return traits(target).name.split(".")[1]


def _kernels(nodes: Iterable[fx.Node], *, fused: bool) -> tuple[tuple[fx.Node, ...], ...]:
    """Neighbouring nodes that become one kernel: pointwise calls, reductions, and views between them."""
    found: list[list[fx.Node]] = []
    before = False
    for node in nodes:
        joins = fused and (is_fusible(node) or is_light(node) or _is_part(node))
        if joins and before:
            found[-1].append(node)
        else:
            found.append([node])
        before = joins
    return tuple(map(tuple, found))


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler writes the kernel of a call itself, together with its neighbours."""
    return is_pointwise(node) or (isinstance(node.target, OpOverload) and _short(node.target) in _REDUCTIONS)


def _descendants(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes that need a tangent, or write in the backward."""
    found: set[fx.Node] = set()
    for node in nodes:
        late = node.meta.get("partitioner_tag") == "must_be_in_backward" or is_tangent(node)
        if node.op != "output" and (late or any(source in found for source in node.all_input_nodes)):
            found.add(node)
    return {node for node in found if node.op != "placeholder"}


def _ancestors(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    stack, found = list(nodes), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return frozenset(found)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat)


def _made_anew(value: Any, storages: dict[int, Tensor]) -> Any:
    """A fake tensor of fixed sizes like one of a traced graph; inputs of one storage share one again."""
    if not isinstance(value, Tensor):
        return size_hint(value)
    storage = value.untyped_storage()
    if storage._cdata not in storages:
        n_bytes = size_hint(storage.nbytes())
        storages[storage._cdata] = torch.empty(n_bytes, dtype=torch.uint8, device=value.device)
    sizes, strides = ([size_hint(size) for size in dims] for dims in (value.shape, value.stride()))
    whole = storages[storage._cdata].view(value.dtype)
    return whole.as_strided(sizes, strides, size_hint(value.storage_offset()))
