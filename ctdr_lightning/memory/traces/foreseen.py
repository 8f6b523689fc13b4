"""A step that has not run yet, foreseen from steps of its structure: their sizes, carried over to its own batch.

Batches of other lengths, or images of other sizes, run the same ops in the same order. Each dimension of a tensor then
grows along a line with one dimension of the batch, or with the product of two. The known steps tell which; where
they leave several, the largest is taken. Sizes that no line explains are not foreseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations_with_replacement
from math import ceil, prod

from ctdr_lightning.memory.traces.trace import Trace

FORESEEN = "sizes"  # the key of a trace's notes which says that its sizes have not been seen
Sizes = tuple[int, ...]


def foreseen(known: Sequence[tuple[Sizes, Trace]], sizes: Sizes) -> Trace | None:
    """The trace of a step, before it runs.

    Args:
        known: Steps of one structure that ran: the dimensions of their batches, as many for each, and their traces.
        sizes: The dimensions of the step's own batch.

    Returns:
        The trace, no tensor of which is smaller than in the step itself as far as the known steps tell; None where they
        do not tell enough.
    """
    alike = ([step for step in known if step[0][place] == size] for place, size in enumerate(sizes))
    attempts = (_foreseen(some, sizes) for some in (known, *alike))  # with as many samples as here, say, less varies
    return next((found for found in attempts if found is not None), None)


def _foreseen(known: Sequence[tuple[Sizes, Trace]], sizes: Sizes) -> Trace | None:
    within = _within([found for found, _ in known], sizes)
    if within is None or len({(trace.n_ticks, len(trace.storages)) for _, trace in known}) > 1:
        return None
    lines = _Lines([found for found, _ in known], within)
    shapes = _shapes([trace for _, trace in known], lines)
    nearest = min(known, key=lambda other: sum(abs(a - b) for a, b in zip(other[0], within, strict=True)))[1]
    n_bytes = _bytes([trace for _, trace in known], shapes, lines)
    every = zip(*(trace.ops for _, trace in known), strict=True)
    temps = [lines.at(tuple(op.temp_bytes for op in alike)) for alike in every]
    return None if None in n_bytes else _carried_over(nearest, shapes, [n or 0 for n in n_bytes], temps)


def with_sizes(trace: Trace, shapes: Sequence[Sizes], n_bytes: Sequence[int]) -> Trace:
    """The same step with other shapes of values and other bytes of storages, those from before the step included."""
    values = tuple(replace(v, shape=shape) for v, shape in zip(trace.values, shapes, strict=True))
    storages = tuple(replace(s, n_bytes=n) for s, n in zip(trace.storages, n_bytes, strict=True))
    grown = sum(new.n_bytes - old.n_bytes for new, old in zip(storages, trace.storages, strict=True) if old.born < 0)
    resident_bytes = trace.resident_bytes + grown
    return replace(trace, values=values, storages=storages, resident_bytes=resident_bytes)


def _within(known: Sequence[Sizes], sizes: Sizes) -> Sizes | None:
    """The batch's dimensions, or larger ones of which the known steps tell; None if there are none.

    A dimension that all known batches have alike, such as the number of samples, tells nothing of larger ones.
    """
    if not known:
        return None
    found = [(size, {other[place] for other in known}) for place, size in enumerate(sizes)]
    if any(len(seen) == 1 and size > max(seen) for size, seen in found):
        return None
    return tuple(size if len(seen) > 1 else max(seen) for size, seen in found)


def _shapes(known: Sequence[Trace], lines: _Lines) -> list[Sizes | None]:
    """The shape of each value; None where it is not told."""
    found: list[Sizes | None] = []
    for records in zip(*(trace.values for trace in known), strict=True):
        alike = len({len(record.shape) for record in records}) == 1
        dims = [lines.at(dims) for dims in zip(*(record.shape for record in records), strict=True)] if alike else [None]
        told = [dim for dim in dims if dim is not None]
        found.append(tuple(told) if len(told) == len(dims) else None)
    return found


def _bytes(known: Sequence[Trace], shapes: Sequence[Sizes | None], lines: _Lines) -> list[int | None]:
    """The bytes of each storage: those of a value that fills it in all known steps, or along a line of their own."""
    found: dict[int, int] = {}
    for value, shape in enumerate(shapes):
        storage = known[0].values[value].storage
        if storage not in found and shape is not None:
            per_element = {
                Fraction(trace.value_bytes(value), max(prod(trace.values[value].shape), 1)) for trace in known
            }
            if len(per_element) == 1:
                found[storage] = ceil(per_element.pop() * prod(shape))
    every = zip(*(trace.storages for trace in known), strict=True)
    own = (lines.at(tuple(storage.n_bytes for storage in alike)) for alike in every)
    return [found.get(storage, along) for storage, along in enumerate(own)]


def _carried_over(
    nearest: Trace, shapes: Sequence[Sizes | None], n_bytes: Sequence[int], temp_bytes: Sequence[int | None]
) -> Trace:
    """A known step with other sizes; its seconds grow with the tensors that grow around an op.

    A weight's gradient keeps its size, and takes twice the time for twice the samples. So do workspaces that no line
    explains, but none is smaller than it was.
    """
    known = [v.shape if shape is None else shape for v, shape in zip(nearest.values, shapes, strict=True)]
    found = with_sizes(nearest, known, n_bytes)
    growth = [_growth(nearest, found, op) for op in range(len(nearest.ops))]
    seconds = [op.seconds * share for op, share in zip(nearest.ops, growth, strict=True)]
    along = [ceil(op.temp_bytes * max(growth[i], 1.0)) for i, op in enumerate(nearest.ops)]
    temps = {i: along[i] if told is None else told for i, told in enumerate(temp_bytes)}
    shares = {i: op.replay_share for i, op in enumerate(nearest.ops)}
    found = found.with_costs(seconds, temps, nearest.python_s_per_replay, shares)
    return replace(found, meta={**nearest.meta, FORESEEN: "are foreseen from other batches"})


def _growth(nearest: Trace, found: Trace, op: int) -> float:
    """Share by which the tensors grow that an op reads or makes, those of a fixed size aside."""
    around = {v for v in (*nearest.ops[op].inputs, *nearest.ops[op].outputs) if v >= 0}
    grown = [
        (found.value_bytes(v), before) for v in around if (before := nearest.value_bytes(v)) != found.value_bytes(v)
    ]
    return sum(now for now, _ in grown) / max(sum(before for _, before in grown), 1) if grown else 1.0


@dataclass
class _Lines:
    """Carries a number that was seen in each known step over to a step with other dimensions of its batch."""

    known: Sequence[Sizes]
    sizes: Sizes
    _found: dict[Sizes, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vary = [place for place, size in enumerate(self.sizes) if any(other[place] != size for other in self.known)]
        pairs = [(a, b) for a, b in combinations_with_replacement(vary, 2)]
        self._features = [self._products((place,)) for place in vary], [self._products(pair) for pair in pairs]

    def _products(self, places: Sizes) -> tuple[Sizes, int]:
        """A product of dimensions in each known step and in the new one."""
        return tuple(prod(other[p] for p in places) for other in self.known), prod(self.sizes[p] for p in places)

    def at(self, seen: Sizes) -> int | None:
        """The number in the new step, rounded up; None where no line goes through the known ones."""
        if seen not in self._found:
            self._found[seen] = seen[0] if len(set(seen)) == 1 else self._along_a_line(seen)
        return self._found[seen]

    def _along_a_line(self, seen: Sizes) -> int | None:
        for rule in (_part, _line):
            for features in self._features:
                found = [rule(feature, seen, new) for feature, new in features]
                fitting = [number for number in found if number is not None]
                if fitting:
                    return max(fitting)
        return None


def _part(feature: Sizes, seen: Sizes, new: int) -> int | None:
    """A multiple of the new dimension, or a whole part of it, rounded up; None if it is not a known one."""
    most, number = max(zip(feature, seen, strict=True))
    times, parts = number // max(most, 1), round(most / max(number, 1))
    if all(times * size == found for size, found in zip(feature, seen, strict=True)):
        return times * new
    rounded = ((size // parts, -(-size // parts)) if parts > 1 else () for size in feature)
    fits = all(found in either for found, either in zip(seen, rounded, strict=True))
    return -(-new // parts) if fits else None


def _line(feature: Sizes, seen: Sizes, new: int) -> int | None:
    """The rising line through the known points, at a new point; None where it misses any point by 1 or more."""
    low, high = min(zip(feature, seen, strict=True)), max(zip(feature, seen, strict=True))
    if low[0] == high[0] or low[1] >= high[1]:
        return None
    slope = Fraction(high[1] - low[1], high[0] - low[0])
    if any(abs(low[1] + slope * (at - low[0]) - number) >= 1 for at, number in zip(feature, seen, strict=True)):
        return None
    return max(ceil(low[1] + slope * (new - low[0])), 0)
