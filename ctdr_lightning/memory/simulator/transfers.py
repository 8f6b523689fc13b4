"""When bytes move: a compute clock and one lane for each link and direction.

The step's ops, replays and codecs move the compute clock. A transfer is asked for at a tick, waits for its lane, and
takes its latency and its bytes over the rate. A read that is late, and a write that is not done where the step wants
its memory back, stall the clock. Cost: about a microsecond a tick and ten a transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ctdr_lightning.memory.plans.actions import Offload
from ctdr_lightning.memory.simulator.away import away_bytes, link_to
from ctdr_lightning.memory.traces.machine import Link
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
    """How long each tick takes without waits; shape ``(n_ticks,)``.

    Args:
        trace: The recorded step.
        extra: ``(tick, seconds)`` of replays and codecs.
    """
    seconds = np.zeros(trace.n_ticks)
    for op in trace.ops:
        seconds[op.tick] += op.seconds
    for tick, spent in extra:
        seconds[tick] += spent
    return seconds


class _Lane:
    """Transfers over one link in one direction, one after the other."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def run(self, asked_s: float, seconds: float, after_s: float = 0.0) -> tuple[float, float]:
        """Returns when a transfer begins and ends."""
        begin = max(asked_s, self.free_s, after_s)
        self.free_s = begin + seconds
        return begin, self.free_s


class _Player:
    """The lanes, the clock's delay, and what is under way."""

    def __init__(self, trace: Trace, trips: Sequence[Trip]) -> None:
        self._trace = trace
        self._links: dict[str, Link] = {trip.action.to: link_to(trace, trip.action.to) for trip in trips}
        self._bytes = {trip.value: away_bytes(trace, trip.value, trip.action.codecs) for trip in trips}
        self._out = {name: _Lane() for name in self._links}
        self._in = {name: self._out[name] if link.shared else _Lane() for name, link in self._links.items()}
        self._moves: list[Transfer] = []
        self._write: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self.delay_s = 0.0

    def send(self, trip: Trip, now_s: float) -> None:
        """A write is asked for."""
        n_bytes, to = self._bytes[trip.value], trip.action.to
        begin_s, end_s = self._out[to].run(now_s, self._links[to].seconds(n_bytes)[0])
        self._write[trip.value] = len(self._moves)
        self._moves.append(Transfer(trip.value, to, True, n_bytes, now_s, begin_s, end_s))

    def want_gone(self, trip: Trip, now_s: float) -> None:
        """The step waits for a write."""
        self._wait(self._write[trip.value], now_s)

    def ask_back(self, trip: Trip, now_s: float) -> None:
        """A read is asked for."""
        n_bytes, to = self._bytes[trip.value], trip.action.to
        written_s = self._moves[self._write[trip.value]].end_s
        begin_s, end_s = self._in[to].run(now_s, self._links[to].seconds(n_bytes)[1], written_s)
        self._read[trip.value] = len(self._moves)
        self._moves.append(Transfer(trip.value, to, False, n_bytes, now_s, begin_s, end_s))

    def need(self, trip: Trip, now_s: float) -> None:
        """The step waits for a read."""
        self._wait(self._read[trip.value], now_s)

    def _wait(self, index: int, now_s: float) -> None:
        move = self._moves[index]
        wait_s = max(move.end_s - now_s, 0.0)
        self.delay_s += wait_s
        self._moves[index] = Transfer(
            move.value, move.link, move.out, move.n_bytes, move.asked_s, move.begin_s, move.end_s, wait_s
        )

    def found(self, starts_s: np.ndarray) -> Transfers:
        """What was played."""
        return Transfers(tuple(self._moves), self.delay_s, starts_s)


# At one tick: first what its op left behind goes, then the step waits for what must be gone, and only at the beginning
# of a later tick is anything asked back or needed.
_BACK, _NEED, _SEND, _GONE = 0, 1, 2, 3


def play(trace: Trace, trips: Sequence[Trip], extra: Iterable[tuple[int, float]] = ()) -> Transfers:
    """Play the transfers of a step.

    Args:
        trace: The recorded step, with its links.
        trips: What is put away elsewhere, its ticks settled by ``scheduled``.
        extra: ``(tick, seconds)`` of replays and codecs.
    """
    starts_s = np.concatenate([[0.0], np.cumsum(tick_seconds(trace, extra))])
    if not trips:
        return Transfers(starts_s=starts_s)
    player = _Player(trace, trips)
    delays = np.zeros(len(starts_s))
    act = {_BACK: player.ask_back, _NEED: player.need, _SEND: player.send, _GONE: player.want_gone}
    for tick, kind, _, trip in sorted(_events(trace, trips), key=lambda e: e[:3]):
        before_s = player.delay_s
        at = tick if kind in (_BACK, _NEED) else tick + 1  # after an op is before the next tick
        act[kind](trip, float(starts_s[at]) + before_s)
        delays[at] += player.delay_s - before_s
    return player.found(starts_s + np.cumsum(delays))


def _events(trace: Trace, trips: Sequence[Trip]) -> Iterable[tuple[int, int, int, Trip]]:
    last = trace.ops[trace.forward_ops[-1]].tick
    for trip in trips:
        made = trace.ops[trace.values[trip.value].op].tick
        out = max(trip.action.out_at, made)
        gone = max(trip.action.gone_by if trip.action.gone_by >= 0 else last, out)
        yield out, _SEND, trip.value, trip
        yield gone, _GONE, trip.value, trip
        if trip.needed is not None:
            back = trip.needed if trip.action.back_at < 0 else min(trip.action.back_at, trip.needed)
            yield max(back, gone + 1), _BACK, trip.value, trip
            yield max(trip.needed, gone + 1), _NEED, trip.value, trip
