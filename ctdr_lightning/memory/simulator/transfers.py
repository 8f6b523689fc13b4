"""When bytes move: a compute clock and one lane for each link and direction.

The step's ops, replays and codecs move the compute clock. A transfer is asked for at a tick, waits for its lane, and
takes its latency and its bytes over the rate. A read that is late, and a write that is not done where the step wants
its memory back, stall the clock. Cost: about a microsecond a tick and ten a transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ctdr_lightning.memory.simulator.actions import Offload
from ctdr_lightning.memory.simulator.away import away_bytes, link_to
from ctdr_lightning.memory.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Trip:
    """A value's way to another place and back.

    Attributes:
        value: Its id.
        action: Where it goes, and when.
        needed: Tick at which it is read; None where it never is.
    """

    value: int
    action: Offload
    needed: int | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer.

    Attributes:
        value: The value's id.
        link: Name of the holder at the link's other end.
        out: Whether it goes away from the device.
        n_bytes: How many bytes move.
        asked_s: When it was asked for, in seconds from the start of the step.
        begin_s: When its lane was free.
        end_s: When it was done.
        wait_s: How long the step stood still for it.
    """

    value: int
    link: str
    out: bool
    n_bytes: int
    asked_s: float
    begin_s: float
    end_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfers:
    """All transfers of a step.

    Attributes:
        moves: One entry a transfer, in the order in which they were asked for.
        waits_s: How long the step stood still for them.
        starts_s: When each tick begins, waits included; shape ``(n_ticks + 1,)``.
    """

    moves: tuple[Transfer, ...] = ()
    waits_s: float = 0.0
    starts_s: np.ndarray = field(default_factory=lambda: np.zeros(1))

    @property
    def moved_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(move.n_bytes for move in self.moves if move.out)


def tick_seconds(trace: Trace, extra: Iterable[tuple[int, float]] = ()) -> np.ndarray:
    """Duration of each tick without waits; shape ``(n_ticks,)``.

    Args:
        trace: The recorded step.
        extra: ``(tick, seconds)`` of replays and codecs.
    """
    seconds = trace.once("tick_seconds", lambda: _own_seconds(trace)).copy()
    for tick, spent in extra:
        seconds[tick] += spent
    return seconds


def _own_seconds(trace: Trace) -> np.ndarray:
    seconds = np.zeros(trace.n_ticks)
    for op in trace.ops:
        seconds[op.tick] += op.seconds
    return seconds


# At one tick: first its op's outputs are sent, then the step waits for values that must be gone, and only at the
# beginning of a later tick is anything asked back or needed.
_BACK, _NEED, _SEND, _GONE = 0, 1, 2, 3


class Lanes:
    """The lanes while a step is played: when each transfer is asked for, begins and ends.

    Args:
        trace: The recorded step, with its links.
        trips: The offloaded values, their ticks settled by ``scheduled``.
        extra: ``(tick, seconds)`` of replays and codecs.

    Attributes:
        waits_s: Time that the step waits for transfers.
    """

    def __init__(self, trace: Trace, trips: Sequence[Trip], extra: Iterable[tuple[int, float]] = ()) -> None:
        self._trips = trips
        self._costs = [_cost(trace, trip) for trip in trips]
        self._starts_s = np.concatenate([[0.0], np.cumsum(tick_seconds(trace, extra))])
        self._shared = {link.to for link in trace.links if link.shared}
        self._free_s: dict[tuple[str, bool], float] = {}
        self._moves: list[tuple[int, bool, float, float, float]] = []
        self._ends: dict[tuple[int, bool], float] = {}
        self._waits: dict[tuple[int, bool], float] = {}
        self.waits_s = 0.0
        self._delays = np.zeros(len(self._starts_s))
        if trips:
            self._play(sorted(_events(trace, trips)))

    def _play(self, events: Iterable[tuple[int, int, int, int]]) -> None:
        starts_s, ends = self._starts_s, self._ends
        for tick, kind, _, trip in events:
            at = tick + (kind in (_SEND, _GONE))  # after an op is before the next tick
            now_s = float(starts_s[at]) + self.waits_s
            if kind == _SEND:
                self._move(trip, True, now_s, now_s)
            elif kind == _BACK:
                self._move(trip, False, now_s, max(now_s, ends[trip, True]))
            elif (wait_s := ends[trip, kind == _GONE] - now_s) > 0.0:
                self._waits[trip, kind == _GONE] = wait_s
                self.waits_s += wait_s
                self._delays[at] += wait_s

    def _move(self, trip: int, out: bool, asked_s: float, ready_s: float) -> None:
        to = self._trips[trip].action.to
        lane = (to, out or to in self._shared)
        begin_s = max(ready_s, self._free_s.get(lane, 0.0))
        end_s = begin_s + self._costs[trip][1 if out else 2]
        self._free_s[lane] = self._ends[trip, out] = end_s
        self._moves.append((trip, out, asked_s, begin_s, end_s))

    def transfers(self) -> Transfers:
        """The moves, in the order of their requests."""
        moves = tuple(self._transfer(*move) for move in self._moves)
        return Transfers(moves, self.waits_s, self._starts_s + np.cumsum(self._delays))

    def _transfer(self, trip: int, out: bool, asked_s: float, begin_s: float, end_s: float) -> Transfer:
        value, to, n_bytes = self._trips[trip].value, self._trips[trip].action.to, self._costs[trip][0]
        return Transfer(value, to, out, n_bytes, asked_s, begin_s, end_s, self._waits.get((trip, out), 0.0))


def _cost(trace: Trace, trip: Trip) -> tuple[int, float, float]:
    """Bytes that a trip moves, and its seconds out and back."""
    known: dict[tuple[int, str, tuple[str, ...]], tuple[int, float, float]] = trace.once("trips", dict)
    key = (trip.value, trip.action.to, trip.action.codecs)
    if key not in known:
        n_bytes = away_bytes(trace, trip.value, trip.action.codecs)
        known[key] = (n_bytes, *link_to(trace, trip.action.to).seconds(n_bytes))
    return known[key]


def _events(trace: Trace, trips: Sequence[Trip]) -> Iterable[tuple[int, int, int, int]]:
    """``(tick, kind, value, place of the trip)``, in any order."""
    last = trace.ops[trace.forward_ops[-1]].tick
    for place, trip in enumerate(trips):
        made = trace.ops[trace.values[trip.value].op].tick
        out = max(trip.action.out_at, made)
        gone = max(trip.action.gone_by if trip.action.gone_by >= 0 else last, out)
        yield out, _SEND, trip.value, place
        yield gone, _GONE, trip.value, place
        if trip.needed is not None:
            back = trip.needed if trip.action.back_at < 0 else min(trip.action.back_at, trip.needed)
            yield max(back, gone + 1), _BACK, trip.value, place
            yield max(trip.needed, gone + 1), _NEED, trip.value, place
