"""Host memory as a place for a GPU's tensors: pinned arenas, reused over steps, copied on streams of their own.

On a GPU a copy is enqueued on a side stream behind the work that made the tensor, and the step's stream waits for its
event before the source is released, and before a returned tensor is read. If the step runs on the processor, two
threads do the same, for tests; that saves nothing, because both sides are host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ctdr_lightning.basics.host_memory import pinnable_bytes
from ctdr_lightning.basics.torch_private import free_unused_pinned_memory
from ctdr_lightning.memory.holders.arenas import SLACK, Arenas, Part
from ctdr_lightning.memory.holders.base import HOLDERS, HolderOptions, as_bytes
from ctdr_lightning.memory.holders.lanes import Lane, StreamLane, ThreadLane, Ticket
from ctdr_lightning.memory.holders.pinned import pin


class _Pinned:
    """One parcel in host memory."""

    def __init__(self, host: Host, tensors: Sequence[Tensor]) -> None:
        self._host = host
        self._kinds = [(t.numel(), t.dtype, t.device) for t in tensors]
        self._devices = frozenset(t.device for t in tensors)
        self._parts: list[list[Part]] = []
        self._sources: list[Tensor] = []
        self._landing: list[Tensor] = []
        self._copies: list[_Copies] = []
        for tensor in tensors:
            self._parts.append(host.take(tensor.nbytes))
        self.n_bytes = sum(part.memory.nbytes for parts in self._parts for part in parts)
        self._sources = [as_bytes(t) for t in tensors]
        self._asked = host.out.moment(tensors)
        pairs = [(memory, piece) for piece, memory in self._pieces(self._sources)]
        self._out = host.out.copy(pairs, host.given_back, self._asked)
        self._copies.append(host.noted("out", self._devices, self._out))

    def _pieces(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of tensors, given as their bytes, and of the host's memory that belong together."""
        for tensor, parts in zip(tensors, self._parts, strict=True):
            done = 0
            for part in parts:
                piece = tensor[done : done + part.memory.nbytes]
                yield piece, part.memory[: piece.nbytes]
                done += piece.nbytes

    def gone(self) -> None:
        """Wait until it is copied; then the sources are let go."""
        if self._sources:
            self._out.wait()
        self._sources = []

    def start(self) -> list[Tensor]:
        """Allocate where it lands and start to copy."""
        if not self._landing:
            with self._asked.at_home():
                self._landing = [torch.empty(n, dtype=dtype, device=device) for n, dtype, device in self._kinds]
                back = self._host.back.copy(list(self._pieces(map(as_bytes, self._landing))), [self._out])
            self._copies.append(self._host.noted("back", self._devices, back))
        return self._landing

    def fetch(self) -> list[Tensor]:
        """Wait until it is copied."""
        landing = self.start()
        self._copies[-1].ticket.wait()
        self._asked.hand_out(landing)
        self._landing = []
        return landing

    def __del__(self) -> None:
        if self._sources or self._landing:  # forgotten on its way: the memory must outlive the copy
            for copies in self._copies:
                copies.ticket.wait()
        for parts in self._parts:
            self._host.give_back(parts)
        for copies in self._copies:
            self._host.follow(copies)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies into or out of host memory; on one way and one set of devices they run by their number."""

    way: tuple[str, frozenset[torch.device]]
    number: int
    ticket: Ticket


class Host:
    """Holds tensors in pinned host memory.

    Args:
        options: Limit and device. On a GPU the default limit is half of the host's free memory, divided by the
            processes on this machine.

    Attributes:
        held_bytes: Bytes of the parts that are in use.
        peak_bytes: The most that were.
        pinned_bytes: Bytes of all arenas, the part that lies free included.
        most_pinned_bytes: The most that were.
        device_bytes: Always 0: no memory of the device is reserved.
    """

    out: Lane
    back: Lane

    def __init__(self, options: HolderOptions) -> None:
        limit = options.limit_bytes
        if options.device == "cuda":
            self.out, self.back = StreamLane(), StreamLane()
            self._arenas = Arenas(pin, pinnable_bytes() if limit is None else limit, free_unused_pinned_memory)
        else:
            self.out, self.back = ThreadLane("ctdr-host-out"), ThreadLane("ctdr-host-back")
            self._arenas = Arenas(partial(torch.empty, dtype=torch.uint8), limit)
        self._number = 0
        self._given_back: dict[tuple[str, frozenset[torch.device]], _Copies] = {}
        self.device_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the parts that are in use."""
        return self._arenas.taken_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that were."""
        return self._arenas.most_taken_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all arenas."""
        return self._arenas.allocated_bytes

    @property
    def most_pinned_bytes(self) -> int:
        """The most that were."""
        return self._arenas.most_allocated_bytes

    @property
    def given_back(self) -> list[Ticket]:
        """The last copies out of memory that is free again: new writes there must come after them."""
        return [copies.ticket for copies in self._given_back.values()]

    def put(self, tensors: Sequence[Tensor]) -> _Pinned:
        """Start to copy tensors."""
        return _Pinned(self, tensors)

    def take(self, n_bytes: int) -> list[Part]:
        """Parts of the arenas, for at least so many bytes.

        Raises:
            OffloadError: If the limit is reached, or no more memory can be pinned.
        """
        return self._arenas.take(n_bytes)

    def give_back(self, parts: list[Part]) -> None:
        """Parts are free again; the next copy into them waits for the last one out of them."""
        self._arenas.give_back(parts)

    def noted(self, way: str, devices: frozenset[torch.device], ticket: Ticket) -> _Copies:
        """Number copies that were asked for."""
        self._number += 1
        return _Copies((way, devices), self._number, ticket)

    def follow(self, copies: _Copies) -> None:
        """Order all later copies after these."""
        last = self._given_back.get(copies.way)
        if last is None or last.number < copies.number:
            self._given_back[copies.way] = copies

    def trim(self, keep_bytes: int) -> None:
        """Unpin arenas of which nothing is in use, the smallest first, until so many bytes and the slack are left."""
        self._arenas.trim(SLACK * keep_bytes)

    def close(self) -> None:
        """Wait for all copies and free the arenas."""
        self.out.close()
        self.back.close()
        self._given_back.clear()
        self._arenas.trim()


HOLDERS.register("host")(Host)
