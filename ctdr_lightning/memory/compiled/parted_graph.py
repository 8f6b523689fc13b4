"""A plan carried out in graphs: the forward hands over the kept values, the backward makes the dropped ones again.

torch's own partitioner has one copy of each recomputed node. Here the backward graph is written by playing the plan:
before each call of the backward the missing calls of the forward are copied in, once for each replay, so that a value
may be made several times. Nothing is freed by hand: generated code lets go of each tensor after its last use.
Complexity: linear in the calls of the rewritten step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from ctdr_lightning.basics.torch_compiler import extract_graphs, is_weight_or_input, raise_getitems
from ctdr_lightning.memory.compiled.joint_graph import is_light
from ctdr_lightning.memory.compiled.joint_trace import JointTrace
from ctdr_lightning.memory.simulator.actions import Actions, Recompute, action_of, dropped_values

Graphs = tuple[fx.GraphModule, fx.GraphModule]


def parted(joint: JointTrace, actions: Actions) -> Graphs:
    """The forward and the backward graph of a joint graph under a plan.

    Args:
        joint: The joint graph and its trace.
        actions: The plan's actions; those that put values away are refused where the plan is made.

    Returns:
        Two graphs, as AOTAutograd's partitioners return them.
    """
    graph, trace = joint.graph, joint.trace
    dropped = dropped_values(trace, actions)
    read_again = {source for v in dropped for source in trace.ops[trace.values[v].op].inputs}
    kept = {v for v in (*trace.saved, *read_again) if v not in dropped and trace.values[v].op >= 0}
    inputs = [node for node in graph.placeholders if is_weight_or_input(node) and joint.value_of(node) >= 0]
    nodes = {joint.value_of(node): node for node in _makers(joint)}
    saved = [*inputs, *(nodes[v] for v in sorted(kept) if v in nodes)]
    sizes = [node for node in graph.module.graph.nodes if node in graph.forward and _is_size(node)]
    forward, backward = extract_graphs(
        graph.module, saved, saved_sym_nodes=sizes, num_fwd_outputs=graph.n_forward_outputs
    )
    stay = {v for v in dropped if _stays(joint, actions, v)}
    backward.graph = _Replays(joint, backward.graph, stay).written()
    backward.recompile()
    return raise_getitems(forward), backward


def _stays(joint: JointTrace, actions: Actions, value: int) -> bool:
    action = action_of(joint.trace, actions, value)
    return isinstance(action, Recompute) and action.stays


def _makers(joint: JointTrace) -> list[fx.Node]:
    """For each value of the forward the node that is the whole of it."""
    made = {(call.node, place): value for value, (call, place) in joint.makers.items()}
    found = []
    for node in joint.graph.module.graph.nodes:
        whole = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        if whole in made and node in joint.graph.forward and joint.value_of(node) == made[whole]:
            found.append(node)
    return found


def _is_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op in ("placeholder", "call_function") and isinstance(value, torch.SymInt | torch.SymFloat)


class _Replays:
    """Writes a backward graph anew, each replay where it is needed.

    Args:
        joint: The joint graph.
        backward: The backward graph as torch extracts it: every recomputed node once, at the start.
        stay: Dropped values that stay after their first replay.
    """

    def __init__(self, joint: JointTrace, backward: fx.Graph, stay: set[int]) -> None:
        self._place = {node: place for place, node in enumerate(backward.nodes)}
        self._new = fx.Graph()
        self._there: dict[fx.Node, fx.Node] = {}  # from a node to its copy that whoever follows may read
        first = [(node,) for node in backward.nodes if node.op in ("placeholder", "output")]
        by_name = {node.name: node for node in backward.nodes}
        kernels = [tuple(by_name[n.name] for n in kernel if n.name in by_name) for kernel in joint.graph.backward]
        self._kernels = [*first[:-1], *filter(None, kernels), first[-1]]
        self._again = set(backward.nodes).difference(*self._kernels)
        staying = {node.name for node in _makers(joint) if joint.value_of(node) in stay}
        self._stay = {node for node in self._again if node.name in staying}

    def written(self) -> fx.Graph:
        """The new graph."""
        for kernel in self._kernels:
            self._write(kernel)
        self._new.eliminate_dead_code()
        self._new.lint()
        return self._new

    def _write(self, kernel: tuple[fx.Node, ...]) -> None:
        """Copy the nodes of a kernel, behind a replay of whatever they miss."""
        held: dict[fx.Node, fx.Node] = {}
        for source in dict.fromkeys(a for node in kernel for a in node.all_input_nodes):
            if source in self._again and source not in self._there and source not in held:
                self._replay(source, held)
        for node in kernel:
            copy = self._new.node_copy(node, lambda a: held.get(a) or self._there[a])
            copy.meta = dict(node.meta)
            self._there[node] = copy

    def _replay(self, target: fx.Node, held: dict[fx.Node, fx.Node]) -> None:
        """Copy what is missing of a node; it and the value that it is a view of are held."""
        missing, stack = set[fx.Node](), [target]
        while stack:
            node = stack.pop()
            if node in missing or node not in self._again or node in held or node in self._there:
                continue
            missing.add(node)
            stack.extend(node.all_input_nodes)
            if isinstance(node.meta.get("val"), (tuple, list)):  # results that stay are there from now on
                stack.extend(user for user in node.users if user in self._stay)
        here: dict[fx.Node, fx.Node] = {}
        for node in sorted(missing, key=self._place.__getitem__):
            here[node] = self._new.node_copy(node, lambda a: here.get(a) or held.get(a) or self._there[a])
        self._there |= {node: copy for node, copy in here.items() if node in self._stay}
        for node in _views_down(target):
            if node in here:
                held[node] = here[node]


def _views_down(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and what it is a view of, down to the whole value."""
    yield node
    while is_light(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node
