"""The chain inside a trace: points of the forward that one value alone crosses.

Chain policies plan on it; users need not declare it. Between two ops several tensors may be alive for later ops. Where
only one does (a block's output), whatever came before can be forgotten but for it. Values under ``SMALL_SHARE`` of the
largest (masks, indices, statistics) may cross as well; they are held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from ctdr_lightning.memory.simulator.actions import KEEP, RECOMPUTE, Action
from ctdr_lightning.memory.traces.trace import OpRecord, Trace

# Masks, indices and statistics may cross a cut in addition to its value: they are held. Not tuned.
SMALL_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Stage:
    """The forward between two cut points.

    Attributes:
        first: Position, among the forward's ops, of its first op.
        last: Position of its last op.
        output: The value that crosses the cut after it; -1 for the last stage.
        inner: Values made inside that are worth caching, without ``output``.
        saved_bytes: Bytes that autograd saves of them and of ``output``.
        inner_bytes: Bytes that autograd saves of them, without ``output``.
        output_bytes: Size of ``output``.
        forward_seconds: Time to run its ops once more.
        backward_seconds: Time of the backward ops that follow a read of a value saved in it.
        forward_ticks: Ticks of its ops.
        backward_ticks: Ticks of those backward ops.
    """

    first: int
    last: int
    output: int
    inner: tuple[int, ...]
    saved_bytes: int
    inner_bytes: int
    output_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_ticks: tuple[int, ...]
    backward_ticks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages in forward order.

    Attributes:
        stages: The stages.
        held: Small values that cross cuts in addition to the stages' outputs.
        cached: Values whose replay may serve more than once, so that it is worth caching: those that autograd saves,
            and those that several ops read.
    """

    stages: tuple[Stage, ...]
    held: frozenset[int]
    cached: frozenset[int]

    def actions(self, kept_stages: Set[int], dropped_stages: Set[int]) -> dict[int, Action]:
        """Actions by stage.

        Args:
            kept_stages: Stages whose output is held.
            dropped_stages: Stages whose inner values, and whose output unless held, are recomputed.
        """
        actions: dict[int, Action] = dict.fromkeys(self.held, KEEP)
        for index, stage in enumerate(self.stages):
            if index in dropped_stages:
                actions.update((v, RECOMPUTE) for v in stage.inner if v not in self.held)
            if stage.output >= 0 and index in kept_stages:
                actions[stage.output] = KEEP
            elif stage.output in self.cached and index in dropped_stages:
                actions[stage.output] = RECOMPUTE
        return actions

    @property
    def note(self) -> str:
        """A sentence for the user if there is no chain to plan on; else empty."""
        if len(self.stages) > 1:
            return ""
        return "This net's forward is not a chain: there is no point that a single large tensor crosses alone."

    def coarser(self, most_stages: int) -> Chain:
        """The chain with neighbours joined, so that it has at most so many stages."""
        size = -(-len(self.stages) // most_stages)
        if size <= 1:
            return self
        groups = [self.stages[i : i + size] for i in range(0, len(self.stages), size)]
        return replace(self, stages=tuple(self._join(group) for group in groups))

    def _join(self, group: Sequence[Stage]) -> Stage:
        last = group[-1]
        between = tuple(s.output for s in group[:-1] if s.output in self.cached)
        return replace(
            last,
            first=group[0].first,
            inner=(*(v for s in group for v in s.inner), *between),
            saved_bytes=sum(s.saved_bytes for s in group),
            inner_bytes=sum(s.saved_bytes for s in group[:-1]) + last.inner_bytes,
            forward_seconds=sum(s.forward_seconds for s in group),
            backward_seconds=sum(s.backward_seconds for s in group),
            forward_ticks=tuple(t for s in group for t in s.forward_ticks),
            backward_ticks=tuple(t for s in group for t in s.backward_ticks),
        )


def find_chain(trace: Trace) -> Chain:
    """Find the forward's cut points. Linear in ops and values; a net without any is one stage."""
    position = {op: i for i, op in enumerate(trace.forward_ops)}
    last_use = _last_uses(trace, position)
    made = [(position[trace.values[v].op], v) for v in range(len(trace.values)) if trace.values[v].op in position]
    largest = max((trace.value_bytes(v) for v in trace.saved), default=0)
    small = {v for _, v in made if trace.value_bytes(v) < SMALL_SHARE * largest}
    cuts, held = _cuts(trace, sorted(made), last_use, small)
    cached = _worth_caching(trace)
    return Chain(tuple(_stages(trace, cuts, position, cached)), frozenset(held), cached)


def _last_uses(trace: Trace, position: dict[int, int]) -> dict[int, int]:
    last: dict[int, int] = {}
    for op, i in position.items():
        for source in trace.ops[op].inputs:
            last[source] = max(last.get(source, -1), i)
    return last


def _cuts(
    trace: Trace, made: list[tuple[int, int]], last_use: dict[int, int], small: set[int]
) -> tuple[list[tuple[int, int]], set[int]]:
    """Cut points as ``(position, value)``; also the small values that cross them."""
    starts: dict[int, list[int]] = {}
    for i, value in made:
        if last_use.get(value, -1) > i:
            starts.setdefault(i, []).append(value)
    live: set[int] = set()
    cuts: list[tuple[int, int]] = []
    crossing: dict[int, int] = {}
    held: set[int] = set()
    for i in range(len(trace.forward_ops)):
        live |= set(starts.get(i, ()))
        live = {v for v in live if last_use[v] > i}
        large = live - small
        if len(large) == 1 and not large & trace.unholdable:
            (value,) = large
            if value in crossing:
                cuts[crossing[value]] = (i, value)
            else:
                crossing[value] = len(cuts)
                cuts.append((i, value))
            held |= live & small
    return cuts, held


def _stages(trace: Trace, cuts: list[tuple[int, int]], position: dict[int, int], cached: frozenset[int]) -> list[Stage]:
    inner: dict[int, list[int]] = {}
    bounds = [i for i, _ in cuts] + [len(trace.forward_ops) - 1]
    stage_of = {}
    index = 0
    for i in range(len(trace.forward_ops)):
        while i > bounds[index]:
            index += 1
        stage_of[i] = index
    for value in cached:
        inner.setdefault(stage_of[position[trace.values[value].op]], []).append(value)
    backward = _backward_ops(trace, position, stage_of)
    stages, first = [], 0
    for index, last in enumerate(bounds):
        output = cuts[index][1] if index < len(cuts) else -1
        values = tuple(sorted(v for v in inner.get(index, ()) if v != output))
        saved = {trace.values[v].storage for v in (*values, output) if v >= 0 and trace.values[v].saves}
        inside = saved - {trace.values[output].storage} if output >= 0 else saved
        ops = trace.forward_ops[first : last + 1]
        stages.append(
            Stage(
                first, last, output, values,
                sum(trace.storages[s].n_bytes for s in saved),
                sum(trace.storages[s].n_bytes for s in inside),
                trace.value_bytes(output) if output >= 0 else 0,
                sum(trace.replay_seconds(i) for i in ops),
                sum(op.seconds for op in backward.get(index, ())),
                tuple(trace.ops[i].tick for i in ops),
                tuple(op.tick for op in backward.get(index, ())),
            )
        )  # fmt: skip
        first = last + 1
    return stages


def _worth_caching(trace: Trace) -> frozenset[int]:
    readers: Counter[int] = Counter()
    for index in trace.forward_ops:
        op = trace.ops[index]
        if any(v >= 0 and trace.values[v].op == index for v in op.outputs):  # a view reads nothing
            readers.update(set(op.inputs))
    return frozenset(v for v in trace.droppable if trace.values[v].saves or readers[v] > 1)


def _backward_ops(trace: Trace, position: dict[int, int], stage_of: dict[int, int]) -> dict[int, list[OpRecord]]:
    """The backward's ops by stage: an op belongs to the stage whose saved value was asked for last before it."""
    asked = sorted(
        (tick, stage_of[position[v.op]])
        for v in trace.values
        if v.op in position
        for s in v.saves
        for tick in s.unpacked
    )
    found: dict[int, list[OpRecord]] = {}
    current, i = max(stage_of.values(), default=0), 0
    for op in trace.ops:
        if not op.backward:
            continue
        while i < len(asked) and asked[i][0] < op.tick:
            current, i = asked[i][1], i + 1
        found.setdefault(current, []).append(op)
    return found
