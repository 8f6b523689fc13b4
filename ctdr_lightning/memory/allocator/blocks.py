"""A step's requests to an allocator, and its releases, in order and under given actions.

At a tick the op's outputs are requested, then its workspace, which is released at once; tensors without a holder are
released at the end of the tick. A replay requests each tensor when its op runs, also the result of an in-place op,
because a replay must not write to its inputs. It releases the tensor after its last reader; a tensor that stays is
held until the simulator's end of it. Tensors from before the step are requested first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ctdr_lightning.memory.simulator.actions import Actions, Offload
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
Moment = tuple[int, int, int]
_OUTPUTS, _INSIDE, _RELEASES = 0, 1, 2
Request = tuple[int, Moment, Moment]


def lifetimes(trace: Trace, actions: Actions | None = None) -> list[Lifetime]:
    """All requests of a step, in order; those for tensors from before the step come first.

    Args:
        trace: The recorded step.
        actions: By value id; None for the plain step.

    Returns:
        One entry a request. A tensor that outlives the step, such as a gradient, is released at its last moment.

    Example:
        >>> lifetimes(Trace((), (), (), 0, resident_bytes=512))
        [Lifetime(n_bytes=512, first=0, last=1)]
    """
    return _in_order(requests_of(trace, actions))


def requests_of(trace: Trace, actions: Actions | None = None) -> list[Request]:
    """The requests by their moments: ``(bytes, first, last)``. A moment begins with its tick.

    The most that is live within a tick equals the simulator's figure for the tick.
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
    return requests


def _in_order(requests: list[Request]) -> list[Lifetime]:
    moments = sorted({moment for _, first, last in requests for moment in (first, last)})
    place = {moment: i for i, moment in enumerate(moments)}
    found = [Lifetime(n_bytes, place[first], place[last]) for n_bytes, first, last in requests]
    return sorted(found, key=lambda r: r.first)


def _held(first: int, last: int) -> tuple[Moment, Moment]:
    return (first, _OUTPUTS, 0), (last, _RELEASES, 0)


def _inside(tick: int, first: int, last: int) -> tuple[Moment, Moment]:
    return (tick, _INSIDE, 2 * first), (tick, _INSIDE, 2 * last + 1)


def _before(trace: Trace, simulator: Simulator) -> Iterator[Request]:
    """Bytes that are resident throughout; those that the step does not touch count as one request."""
    known = [s.n_bytes for s in trace.storages if s.born < 0]
    used = {action.to for action in simulator.actions.values() if isinstance(action, Offload)}
    staging = [link_to(trace, name).device_bytes for name in sorted(used)]
    for n_bytes in (*known, trace.resident_bytes - sum(known), *staging):
        if n_bytes > 0:
            yield (n_bytes, *_held(-1, trace.n_ticks))


def _tensors(trace: Trace, simulator: Simulator) -> Iterator[Request]:
    """Outputs of the ops, and the bytes that codecs and transfers put in their place."""
    for storage, end in zip(trace.storages, simulator.timeline().ends, strict=True):
        if storage.born >= 0 and storage.n_bytes:
            yield (storage.n_bytes, *_held(storage.born, min(int(end), trace.n_ticks)))
    for parts in simulator.effects()[1]:
        for first, last, n_bytes in parts.intervals:
            yield (n_bytes, *_held(first, last))


def _replays(index: TraceIndex, effect: Effect, places: Counter[int]) -> Iterator[Request]:
    """The requests of a group's replays, each when the op runs that makes it.

    Args:
        index: The recorded step.
        effect: The group's.
        places: For each tick how many moments inside of it are taken.
    """
    for tick, _, ops in effect.replays:
        start = places[tick]
        places[tick] += len(ops)
        last_use = {source: place for place, op in enumerate(ops) for source in index.sources[op]}
        for place, op in enumerate(ops):
            if index.temps[op]:
                yield (index.temps[op], *_inside(tick, start + place, start + place))
            for value in index.made[op]:
                until = effect.left.get((tick, value))
                # a value that ends with the replay is live until the replay's last op
                last = len(ops) - 1 if until is not None else max(last_use.get(value, place), place)
                first, gone = _inside(tick, start + place, start + last)
                yield index.n_bytes[value], first, (until, _RELEASES, 0) if until is not None and until > tick else gone
