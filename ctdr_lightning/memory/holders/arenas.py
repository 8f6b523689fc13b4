"""Host memory in a few large arenas, of which tensors take parts.

Pinning synchronises the device, and torch rounds pinned sizes up to a power of two: arenas are powers of two. A
tensor for which no free part is long enough is cut over several, so that steps of 200 random lengths pin no more than a
quarter above their largest need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ctdr_lightning.basics.errors import OffloadError
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.holders.extents import Extents

GRANULE = 512
# A new arena is at least an eighth of the held bytes. Played with 200 random lengths of three kinds of steps: an eighth
# takes 11 to 37 arenas and at most 1.22 of the need, a quarter up to 200 arenas, as few of those are within the slack.
GROWTH_SHARE = 1 / 8
# How much more than the largest need may be pinned before free arenas are given back and new ones are made smaller.
SLACK = 1.25
# No part of a tensor is shorter, and no arena: a copy of 64 KiB takes about as long as asking for it.
LEAST_PART_BYTES = 1 << 16


class _Arena:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.extents = Extents(GRANULE, memory.nbytes)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an arena.

    Attributes:
        memory: Its bytes, shape ``(n_bytes,)``.
        arena: Whose it is.
        start: Where it begins there.
    """

    memory: Tensor
    arena: _Arena
    start: int


class Arenas:
    """Parts of arenas, taken and given back.

    Args:
        allocate: From a number of bytes to memory.
        limit_bytes: No more than this is allocated; None for no limit.
        freed: Called when arenas were let go.

    Attributes:
        taken_bytes: Bytes of the parts that are taken.
        most_taken_bytes: The most that were.
        allocated_bytes: Bytes of all arenas.
        most_allocated_bytes: The most that were.

    Example:
        >>> import torch
        >>> arenas = Arenas(lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8))
        >>> parts = arenas.take(60_000)
        >>> arenas.give_back(parts)
        >>> [len(part.memory) for part in parts], arenas.allocated_bytes
        ([60416], 65536)
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        limit_bytes: int | None = None,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._allocate, self._freed = allocate, freed
        self._limit_bytes = limit_bytes
        self._arenas: list[_Arena] = []
        self.taken_bytes = self.most_taken_bytes = 0
        self.allocated_bytes = self.most_allocated_bytes = 0

    def take(self, n_bytes: int) -> list[Part]:
        """Parts of at least so many bytes together; one where there is a free part that is long enough.

        Raises:
            OffloadError: If the limit is reached, or the system has no more memory to pin.
        """
        left = max(-(-n_bytes // GRANULE), 1) * GRANULE
        parts: list[Part] = []
        self._count(left)
        while left:
            part = self._find(left)
            if part is None:
                try:
                    self._grow(left)
                except BaseException:
                    self._count(-left)
                    self.give_back(parts)
                    raise
                continue
            parts.append(part)
            left -= part.memory.nbytes
        return parts

    def give_back(self, parts: list[Part]) -> None:
        """Parts are free again."""
        for part in parts:
            part.arena.extents.give_back(part.start, part.memory.nbytes)
            self._count(-part.memory.nbytes)

    def trim(self, keep_bytes: float = 0) -> None:
        """Let go of arenas of which nothing is taken, the smallest first, until so many bytes are left."""
        before = self.allocated_bytes
        for arena in reversed(list(self._arenas)):
            if self.allocated_bytes > keep_bytes and arena.extents.unused:
                self._arenas.remove(arena)
                self.allocated_bytes -= arena.memory.nbytes
        if self.allocated_bytes < before:
            del arena
            self._freed()

    def _count(self, n_bytes: int) -> None:
        self.taken_bytes += n_bytes
        self.most_taken_bytes = max(self.most_taken_bytes, self.taken_bytes)

    def _find(self, n_bytes: int) -> Part | None:
        """A free part of so many bytes, or else the longest."""
        for arena in self._arenas:  # the largest first
            start = arena.extents.find(n_bytes)
            if start is not None:
                return Part(arena.memory[start : start + n_bytes], arena, start)
        longest = max(self._arenas, key=lambda a: a.extents.longest_free_bytes, default=None)
        length = longest.extents.longest_free_bytes if longest is not None else 0
        if longest is None or length < LEAST_PART_BYTES:
            return None
        start = longest.extents.take(length)
        return Part(longest.memory[start : start + length], longest, start)

    def _grow(self, n_bytes: int) -> None:
        """Add an arena: for all of the request, or, where that is too much, for a part of it."""
        most = SLACK * self.most_taken_bytes
        size = _power_above(max(n_bytes, int(GROWTH_SHARE * self.taken_bytes), LEAST_PART_BYTES))
        limit = self._limit_bytes
        if self.allocated_bytes + size > (most if limit is None else min(most, limit)):
            size = max(_power_below(n_bytes), min(_power_above(n_bytes), LEAST_PART_BYTES))
        self.trim(max((most if limit is None else min(most, limit)) - size, 0))
        if limit is not None and self.allocated_bytes + size > limit:
            raise OffloadError(
                f"Offloaded tensors take {format_bytes(self.allocated_bytes + size)} of host memory, the limit is "
                f"{format_bytes(limit)}.",
                "Free host memory, offload to disk as well, or raise the memory_budget.",
            )
        self._arenas.append(_Arena(self._allocate(size)))
        self._arenas.sort(key=lambda arena: -arena.memory.nbytes)
        self.allocated_bytes += size
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)
