"""Traces of plain graphs: nodes with bytes and seconds, as the papers draw them, without any net behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ctdr_lightning.memory.traces.trace import OpRecord, Save, StorageRecord, Trace, ValueRecord


@dataclass(frozen=True)
class Node:
    """One forward op: what it reads, the bytes of its output, its seconds, and whether autograd saves the output."""

    parents: tuple[int, ...]
    n_bytes: int = 1
    forward_s: float = 1.0
    backward_s: float = 2.0
    saved: bool = True
    temp_bytes: int = 0


@dataclass
class _Draft:
    """A trace in the making: storages and values share their index."""

    tick: int = 0
    ops: list[OpRecord] = field(default_factory=list)
    made_by: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    saves: dict[int, list[Save]] = field(default_factory=dict)

    def run(self, name: str, inputs: Sequence[int], n_bytes: int, seconds: float, temp: int, *, backward: bool) -> int:
        value = len(self.made_by)
        self.made_by.append(len(self.ops))
        self.sizes.append(n_bytes)
        self.born.append(self.tick)
        self.end.append(self.tick)
        for source in inputs:
            self.end[source] = max(self.end[source], self.tick)
        self.ops.append(OpRecord(name, self.tick, tuple(inputs), (value,), seconds, temp, "", backward, ""))
        self.tick += 1
        return value

    def finish(self) -> Trace:
        values = tuple(
            ValueRecord(v, op, (self.sizes[v],), "uint8", self.tick, tuple(self.saves.get(v, ())), "")
            for v, op in enumerate(self.made_by)
        )
        rows = zip(self.sizes, self.born, self.end, strict=True)
        return Trace(tuple(self.ops), values, tuple(StorageRecord(*row) for row in rows), self.tick)


def graph_trace(nodes: Sequence[Node]) -> Trace:
    """The trace of a graph whose nodes each save their inputs for their own backward.

    The backward of a node reads its output's gradient and its saved inputs, and makes its inputs' gradients one by one,
    as large as the inputs. The program holds an output until its last reader has run.
    """
    draft = _Draft()
    for node in nodes:
        draft.run("node.forward", node.parents, node.n_bytes, node.forward_s, node.temp_bytes, backward=False)
    gradient = {len(nodes) - 1: draft.run("seed", (), nodes[-1].n_bytes, 0.0, 0, backward=True)}
    for index in reversed(range(len(nodes))):
        _backward(draft, nodes, index, gradient)
    return draft.finish()


def _backward(draft: _Draft, nodes: Sequence[Node], index: int, gradient: dict[int, int]) -> None:
    node = nodes[index]
    awaited = [p for p in dict.fromkeys(node.parents) if nodes[p].saved]
    unpacked = {}
    for parent in awaited:
        unpacked[parent] = draft.tick
        draft.tick += 1
    seconds = node.backward_s / max(len(node.parents), 1)
    for parent in node.parents or (None,):
        n_bytes = nodes[parent].n_bytes if parent is not None else 0
        made = draft.run("node.backward", (gradient[index],), n_bytes, seconds, node.temp_bytes, backward=True)
        if parent in gradient:
            made = draft.run("add", (gradient[parent], made), n_bytes, 0.0, 0, backward=True)
        if parent is not None:
            gradient[parent] = made
    for parent in awaited:
        draft.saves.setdefault(parent, []).append(Save(index, (unpacked[parent],), draft.tick - 1))


def chain(sizes: Sequence[int], forward_s: Sequence[float] | None = None) -> list[Node]:
    """A chain: each node reads the one before."""
    seconds = forward_s or [1.0] * len(sizes)
    rows = zip(sizes, seconds, strict=True)
    return [Node((i - 1,) if i else (), size, s, 2 * s) for i, (size, s) in enumerate(rows)]


def residual(n_blocks: int, n_bytes: int = 8) -> list[Node]:
    """Blocks of two nodes with a shortcut; the sums are not saved, the activation behind each is."""
    nodes = [Node((), n_bytes)]
    for _ in range(n_blocks):
        start = len(nodes) - 1
        nodes += [Node((start,), n_bytes, 3.0, 6.0), Node((start + 1,), n_bytes, 3.0, 6.0)]
        nodes += [Node((start, start + 2), n_bytes, 0.2, 0.2, saved=False), Node((start + 3,), n_bytes, 0.2, 0.2)]
    return nodes


def u_net(depth: int, n_bytes: int = 64) -> list[Node]:
    """An encoder whose levels are read again by the decoder; the levels halve in bytes."""
    nodes, levels = [Node((), n_bytes)], []
    for level in range(depth):
        levels.append(len(nodes) - 1)
        nodes.append(Node((len(nodes) - 1,), n_bytes >> (level + 1), 2.0, 4.0))
    for level in reversed(range(depth)):
        nodes.append(Node((len(nodes) - 1, levels[level]), n_bytes >> level, 2.0, 4.0))
    return nodes


def dense_block(n_layers: int, n_bytes: int = 4) -> list[Node]:
    """Every node reads all nodes before it."""
    return [Node(tuple(range(i)), n_bytes, 1.0 + i / 4, 2.0 + i / 2) for i in range(n_layers)]


def vgg(n_bytes: int = 256) -> list[Node]:
    """The thirteen convolutions of VGG-16: bytes halve and halve again, seconds rise."""
    sizes, seconds = [], []
    for level, convolutions in enumerate((2, 2, 3, 3, 3)):
        sizes += [n_bytes >> level] * convolutions
        seconds += [1.0 + level / 2] * convolutions
    return chain(sizes, seconds)


GRAPHS = {
    "uniform chain": chain([4] * 16),
    "vgg": vgg(),
    "residual": residual(6),
    "u-net": u_net(4),
    "dense block": dense_block(8),
    "one node": chain([4]),
}
