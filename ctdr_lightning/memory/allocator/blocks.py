"""What a step asks of an allocator: requests and releases in order, under given actions.

At a tick the op's outputs are asked for, then its workspace, which goes back at once; what nobody holds any more goes
back when the tick is over. A replay asks for each tensor that it makes and lets go of it after its last reader; what
stays is held until the simulator says so. What was there before the step is asked for first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ctdr_lightning.memory.plans.actions import Actions, Offload
from ctdr_lightning.memory.simulator.away import link_to
from ctdr_lightning.memory.simulator.effect import Effect
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.trace_index import TraceIndex
from ctdr_lightning.memory.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One request.

    Attributes:
        n_bytes: Its size.
        first: Moment of the request; moments count the requests and releases of the step.
        last: Moment of the release.
    """

    n_bytes: int
    first: int
    last: int


# When something happens: a tick, then outputs before workspaces and replays, and those before releases; then an order.
_Moment = tuple[int, int, int]
_OUTPUTS, _INSIDE, _RELEASES = 0, 1, 2
_Request = tuple[int, _Moment, _Moment]


def lifetimes(trace: Trace, actions: Actions | None = None) -> list[Lifetime]:
    """All requests of a step, in order; those for what is there before the step come first.

    Args:
        trace: The recorded step.
        actions: By value id; None for the plain step.

    Returns:
        One entry a request. A tensor that outlives the step, such as a gradient, is released at its last moment.

    Example:
        >>> lifetimes(Trace((), (), (), 0, resident_bytes=512))
        [Lifetime(n_bytes=512, first=0, last=1)]
    """
    simulator = Simulator(trace, actions)
    requests = [*_before(trace, simulator), *_tensors(trace, simulator)]
    places: Counter[int] = Counter()
    for op in trace.ops:
        if op.temp_bytes:
            requests.append((op.temp_bytes, *_inside(op.tick, 0, 0)))
            places[op.tick] = 1
    for effect in simulator.effects()[0]:
        requests += _replays(simulator.index, effect, places)
    return _in_order(requests)


def _in_order(requests: list[_Request]) -> list[Lifetime]:
    moments = sorted({moment for _, first, last in requests for moment in (first, last)})
    place = {moment: i for i, moment in enumerate(moments)}
    found = [Lifetime(n_bytes, place[first], place[last]) for n_bytes, first, last in requests]
    return sorted(found, key=lambda r: r.first)


def _held(first: int, last: int) -> tuple[_Moment, _Moment]:
    return (first, _OUTPUTS, 0), (last, _RELEASES, 0)


def _inside(tick: int, first: int, last: int) -> tuple[_Moment, _Moment]:
    return (tick, _INSIDE, 2 * first), (tick, _INSIDE, 2 * last + 1)


def _before(trace: Trace, simulator: Simulator) -> Iterator[_Request]:
    """What is in memory all along; what the step did not touch counts as one request."""
    known = [s.n_bytes for s in trace.storages if s.born < 0]
    used = {action.to for action in simulator.actions.values() if isinstance(action, Offload)}
    staging = [link_to(trace, name).device_bytes for name in sorted(used)]
    for n_bytes in (*known, trace.resident_bytes - sum(known), *staging):
        if n_bytes > 0:
            yield (n_bytes, *_held(-1, trace.n_ticks))


def _tensors(trace: Trace, simulator: Simulator) -> Iterator[_Request]:
    """What the ops make and what codecs and transfers put in its place."""
    for storage, end in zip(trace.storages, simulator.timeline().ends, strict=True):
        if storage.born >= 0 and storage.n_bytes:
            yield (storage.n_bytes, *_held(storage.born, min(int(end), trace.n_ticks)))
    for parts in simulator.effects()[1]:
        for first, last, n_bytes in parts.intervals:
            yield (n_bytes, *_held(first, last))


def _replays(index: TraceIndex, effect: Effect, places: Counter[int]) -> Iterator[_Request]:
    """The requests of a group's replays, and of what they leave behind.

    Args:
        index: The recorded step.
        effect: The group's.
        places: For each tick how many moments inside of it are taken.
    """
    # The simulator counts what stays from the tick after its replay; the replay's own bytes are in its peak.
    left = Counter((first - 1, n_bytes) for first, _, n_bytes in effect.intervals)
    for first, last, n_bytes in effect.intervals:
        yield (n_bytes, *_held(first - 1, last))
    for tick, _, ops in effect.replays:
        start = places[tick]
        places[tick] += len(ops)
        for n_bytes, first, last in _replay(index, ops, tick, left):
            yield (n_bytes, *_inside(tick, start + first, start + last))


def _replay(index: TraceIndex, ops: list[int], tick: int, left: Counter[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """``(bytes, first, last)`` of all that a replay makes and does not leave behind, by places in its list of ops."""
    last_use = {source: place for place, op in enumerate(ops) for source in index.sources[op]}
    for place, op in enumerate(ops):
        if index.temps[op]:
            yield index.temps[op], place, place
        for value in index.made[op]:
            n_bytes = index.n_bytes[value]
            if left[tick, n_bytes] > 0:
                left[tick, n_bytes] -= 1
            else:
                yield n_bytes, place, max(last_use.get(value, place), place)
