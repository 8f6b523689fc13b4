"""The storages of a step while it runs, and their records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from threading import get_ident
from time import sleep
from typing import Any

from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.traces.trace import StorageRecord
from ctdr_lightning.memory.values.gathered import GatheredStorages
from ctdr_lightning.memory.values.op_traits import COLLECTIVE, traits

# gloo's reduce-scatter splits a buffer of its own and copies a part: two ops after the collective.
_LAST_USE_TICKS = 2
# Chosen, not tuned: on a loaded machine the buffer of the last reduce-scatter outlived one recording in 50. What torch
# holds in C++ keeps its Python object, so that nothing tells such a buffer from one that stays.
_WAITS, _WAIT_S = 20, 1e-3


class LoggedStorage:
    """One storage, from its first use on.

    Attributes:
        index: Its number in the trace.
        n_bytes: Its size.
        born: Tick of the op that made it; -1 for one from before the step.
        end: Last tick at which a tensor of the program had it, as far as is known.
        gone: Tick after which it was freed; None while it lives.
        live: How many tensors of the program have it.
        seen: Last tick at which an op took or made it.
        backward: Whether the backward made it.
        value: Id of its present contents.
        ref: A weak reference to it.
        filled_at: Tick of the gather that filled it with weights; -1 while none has.
        collective: Tick of the collective just before its first use, which may have made it; -1 for none.
        full: First and last tick of each time that it held gathered weights; those that it still holds left out.
    """

    __slots__ = (
        "backward", "born", "collective", "end", "filled_at", "full", "gone", "index", "live", "n_bytes", "ref", "seen",
        "value",
    )  # fmt: skip

    def __init__(self, index: int, n_bytes: int, born: int, collective: int) -> None:
        self.index, self.n_bytes, self.born, self.collective = index, n_bytes, born, collective
        self.end = self.seen = born
        self.gone: int | None = None
        self.live = 0
        self.backward = False
        self.value = self.filled_at = -1
        self.full: list[tuple[int, int]] = []
        self.ref: Any = None

    @property
    def is_filled_again(self) -> bool:
        """Whether it held weights before in this step, and holds none now: a gather brings back the same."""
        return bool(self.full) and self.filled_at < 0

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory from before the step to its end."""
        return self.n_bytes if self.born < 0 and not self.full else 0

    def frame_end(self, held_until: int, n_ticks: int) -> int:
        """Last tick at which the program itself held the storage."""
        if self.born < 0 or self.live > 0:
            return n_ticks
        gone = n_ticks if self.gone is None else self.gone
        return gone if gone > max(self.end, held_until) else self.end  # a holder that was not seen


class UnseenLives:
    """Notes what no op tells of storages: gathered weights that FSDP frees, and what collectives make and free.

    Args:
        by_data: The storages of the step that are alive, by identity.

    Attributes:
        collective: Tick of the last op, if that was a collective; else -1.
    """

    def __init__(self, by_data: Mapping[int, LoggedStorage]) -> None:
        self.collective = -1
        self._by_data = by_data
        self._gathered = GatheredStorages()
        self._threads: set[int] = set()

    def ran(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tick: int) -> None:
        """A call has run."""
        self.collective = tick if traits(func).pin == COLLECTIVE else -1
        self._threads.add(get_ident())
        for key, data in self._gathered.filled(func, args, kwargs).items():
            storage = self._by_data[key]
            storage.n_bytes, storage.filled_at = data.nbytes(), tick

    def look(self, tick: int) -> None:
        """Note the storages that were emptied since the last look; ``tick``: the last one that has passed."""
        for key in self._gathered.emptied():
            storage = self._by_data[key]
            storage.full.append((storage.filled_at, tick))
            storage.filled_at = -1

    def let_go(self, storage: LoggedStorage, tick: int) -> int:
        """The tick at which the step let go of something on a storage that dies now.

        A thread of gloo's may have the last hold on tensors that were exchanged, and frees them when it gets to it.
        """
        return tick if get_ident() in self._threads else max(storage.seen, storage.end)

    def died(self, storage: LoggedStorage, tick: int) -> None:
        """A storage is freed: one that a collective may have made is not from before the step."""
        storage.gone = self.let_go(storage, tick)
        if storage.born < 0 <= storage.collective:
            storage.born, storage.end = storage.collective, storage.gone


def wait_for_threads(storages: Iterable[LoggedStorage]) -> None:
    """Wait, not for long, where a thread of gloo's may have yet to free what a collective made."""
    passing = [s for s in storages if s.born < 0 <= s.collective and s.seen <= s.collective + _LAST_USE_TICKS]
    for _ in range(_WAITS):
        if all(storage.gone is not None for storage in passing):
            return
        sleep(_WAIT_S)


def records_of(storages: Iterable[LoggedStorage], held: Mapping[int, int], n_ticks: int) -> tuple[StorageRecord, ...]:
    """The records of a step's storages.

    A storage that is emptied between its uses keeps its place with 0 bytes, since autograd holds it all along. Each
    time that it is full is a further record.

    Args:
        storages: In their order.
        held: The last tick at which autograd held a storage, by its index.
        n_ticks: Length of the time axis.
    """
    storages = tuple(storages)
    records = [
        StorageRecord(0 if s.full else s.n_bytes, s.born, s.frame_end(held.get(s.index, -1), n_ticks)) for s in storages
    ]
    return (*records, *(StorageRecord(s.n_bytes, *span) for s in storages for span in _spans(s, n_ticks)))


def _spans(storage: LoggedStorage, n_ticks: int) -> Iterator[tuple[int, int]]:
    yield from storage.full
    if storage.full and storage.filled_at >= 0:
        yield storage.filled_at, n_ticks
