"""Weights of FSDP units in a step: gathered for the forward, freed, and gathered once more for the backward.

A trace has the ops that fill the weights, and one record for each time that a storage is full. So it tells at which
ticks a unit's weights are away, and what the step would be if they stayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ctdr_lightning.memory.traces.trace import Trace

# The second is that of shards of another dimension than the first.
_FILLS = ("fsdp.split_with_sizes_copy.default", "aten.cat.out")


@dataclass(frozen=True, slots=True)
class Gather:
    """The second gather of a unit's weights, for its backward.

    Attributes:
        unit: Path of the unit.
        n_bytes: Bytes of its gathered weights.
        freed_at: Last tick at which they are there for the forward.
        again_at: Tick from which on they are there for the backward.
        hidden_s: Seconds of the backward's other ops from the start of the gather to the first use of its result.
        weights: Indices of their storage records: each one's of the forward and of the backward.
        buffers: Indices of the storages that this gather alone needs.
        ops: Indices of its ops.
    """

    unit: str
    n_bytes: int
    freed_at: int
    again_at: int
    hidden_s: float
    weights: tuple[tuple[int, int], ...]
    buffers: tuple[int, ...]
    ops: tuple[int, ...]

    @property
    def ticks(self) -> int:
        """For how long the weights are away."""
        return self.again_at - self.freed_at


@dataclass(frozen=True, slots=True)
class _Fill:
    op: int
    unit: str
    backward: bool
    record: int


def gathers_of(trace: Trace) -> tuple[Gather, ...]:
    """The second gathers of a step's units, in the order of the forward.

    A unit is left out unless all of its weights are gathered twice, once in the forward and once in the backward, and
    freed both times: nobody has shown what else would change if the weights of another one stayed.

    Args:
        trace: The step, as it was recorded.
    """
    units: dict[str, list[list[_Fill]]] = {}
    for fills in _fills_by_storage(trace).values():
        units.setdefault(fills[0].unit, []).append(fills)
    return tuple(_gather(trace, unit, found) for unit, found in units.items() if all(_is_pair(trace, f) for f in found))


def _fills_by_storage(trace: Trace) -> dict[int, list[_Fill]]:
    """The ops that fill a storage that is empty in between, by the storage's index."""
    born: dict[int, list[int]] = {}
    for index, record in enumerate(trace.storages):
        born.setdefault(record.born, []).append(index)
    found: dict[int, list[_Fill]] = {}
    for index, op in enumerate(trace.ops):
        if op.name not in _FILLS:
            continue
        storages = {trace.values[v].storage for v in op.inputs}
        empty = sorted(s for s in storages if not trace.storages[s].n_bytes)
        full = born.get(op.tick, [])  # an op of these makes nothing new: only times at which a storage is full
        if len(empty) == len(full):
            for storage, time in zip(empty, full, strict=True):
                found.setdefault(storage, []).append(_Fill(index, op.module, op.backward, time))
    return found


def _is_pair(trace: Trace, fills: list[_Fill]) -> bool:
    if [fill.backward for fill in fills] != [False, True]:
        return False
    first, second = (trace.storages[fill.record] for fill in fills)
    return first.n_bytes == second.n_bytes and first.end < second.born and second.end < trace.n_ticks


def _gather(trace: Trace, unit: str, pairs: list[list[_Fill]]) -> Gather:
    weights = tuple((first.record, second.record) for first, second in pairs)
    ops, buffers = _chain(trace, {second.op for _, second in pairs})
    records = [(trace.storages[first], trace.storages[second]) for first, second in weights]
    begun, again = trace.ops[ops[0]].tick, min(second.born for _, second in records)
    between = (op for i, op in enumerate(trace.ops) if begun < op.tick < again and i not in set(ops))
    return Gather(
        unit=unit,
        n_bytes=sum(first.n_bytes for first, _ in records),
        freed_at=max(first.end for first, _ in records),
        again_at=again,
        hidden_s=sum(op.seconds for op in between),
        weights=weights,
        buffers=buffers,
        ops=ops,
    )


def _chain(trace: Trace, fills: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ops that lead to some ops of the backward, these included, and the storages that the backward made for it."""
    begun = next(op.tick for op in trace.ops if op.backward)
    ops: list[int] = []
    buffers: set[int] = set()
    for index in range(max(fills), -1, -1):
        op = trace.ops[index]
        if not op.backward:
            break
        touched = {trace.values[v].storage for v in (*op.inputs, *op.outputs) if v >= 0}
        if index in fills or not touched.isdisjoint(buffers):
            ops.append(index)
            buffers |= {s for s in touched if trace.storages[s].born >= begun and trace.storages[s].n_bytes}
    return tuple(sorted(ops)), tuple(sorted(buffers))


def without_seconds(trace: Trace, gathers: Iterable[Gather]) -> Trace:
    """A copy of a step in which the ops of second gathers take no time of their own."""
    ops = {index for gather in gathers for index in gather.ops}
    seconds = [0.0 if i in ops else op.seconds for i, op in enumerate(trace.ops)]
    return trace.with_costs(seconds, {}, trace.python_s_per_replay)


def staying(trace: Trace, gathers: Iterable[Gather]) -> Trace:
    """A copy of a step in which weights stay from the forward to the backward, and are not gathered again.

    Args:
        trace: The step.
        gathers: Those that are spared.
    """
    gathers = tuple(gathers)
    storages = list(trace.storages)
    for index, end in _stays(trace, gathers):
        storages[index] = replace(storages[index], end=end)
    for index in _gone(gathers):
        storages[index] = replace(storages[index], n_bytes=0)
    spared = {index: 0 for gather in gathers for index in gather.ops}
    seconds = [0.0 if i in spared else op.seconds for i, op in enumerate(trace.ops)]
    changed = trace.with_costs(seconds, spared, trace.python_s_per_replay)
    return replace(changed, storages=tuple(storages))


def _stays(trace: Trace, gathers: tuple[Gather, ...]) -> Iterator[tuple[int, int]]:
    for gather in gathers:
        for first, second in gather.weights:
            yield first, trace.storages[second].end


def _gone(gathers: tuple[Gather, ...]) -> Iterator[int]:
    for gather in gathers:
        yield from gather.buffers
        yield from (second for _, second in gather.weights)
