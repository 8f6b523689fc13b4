"""PyTorch's caching allocator for CUDA, played without a GPU.

Source: the notes on CUDA semantics in PyTorch's documentation and the comments of ``CUDACachingAllocator.cpp``.

Reproduced: sizes are rounded up to 512 bytes; up to 1 MiB come from the small pool, whose segments have 2 MiB, the rest
    from the large one, whose segments have 20 MiB for requests under 10 MiB and else the request rounded up to 2 MiB;
    the smallest free block that is large enough is taken, the one with the lower address among equals; it is split
    where 512 bytes (small pool) or more than 1 MiB (large pool) are left over; a freed block is joined with its free
    neighbours; where a limit is reached, segments that are wholly free go back and the request is tried again. With
    expandable segments a pool is one range of addresses, in which pages of 2 MiB (small) or 20 MiB (large) are mapped,
    and blocks are split wherever 512 bytes are left over. Where a limit is reached, each whole page within a free block
    is unmapped. Such a hole is mapped again where it and the free blocks next to it have the addresses for a request,
    the lowest first. A free block in front of a hole counts as large as both, so that another block is preferred.
Left out: more than one stream, ``max_split_size_mb``, ``roundup_power2_divisions``, garbage collection by threshold.

Complexity: O(log n) comparisons an event for n free blocks, and a list insertion.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from ctdr_lightning.basics.units import format_bytes

# The allocator's own numbers.
SMALLEST = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_SEGMENT_BELOW = 10 << 20
LARGE_GRANULE = 2 << 20
LARGE_POOL_BEGINS = LARGE_SEGMENT << 28  # beyond every address of the small pool; also the addresses of a pool


class NoMemoryLeft(Exception):
    """The allocator's limit leaves no room for a request, although all free segments were given back."""


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment.

    Attributes:
        address: Where it begins.
        n_bytes: Its size, at least the rounded request.
        pool: The pool that it returns to.
        free: Whether it waits in the pool.
        mapped: Whether there is memory at its addresses; where not, it is a hole of an expandable segment.
        before: Its neighbour at lower addresses of the same segment.
        after: Its neighbour at higher addresses of the same segment.
    """

    address: int
    n_bytes: int
    pool: _Pool = field(repr=False)
    free: bool = False
    mapped: bool = True
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class _Pool:
    """Free blocks by size, then by address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        begin = 0 if small else LARGE_POOL_BEGINS
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.holes = [Block(begin, LARGE_POOL_BEGINS, self, mapped=False)]  # of an expandable segment, by address

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.n_bytes, block.address, block), key=lambda entry: entry[:2])

    def remove(self, block: Block) -> None:
        block.free = False
        key = (block.n_bytes, block.address)
        del self.free[bisect_left(self.free, key, key=lambda entry: entry[:2])]

    def take(self, n_bytes: int) -> Block | None:
        """The smallest free block of at least so many bytes, out of the pool."""
        place = bisect_left(self.free, (n_bytes, -1), key=lambda entry: entry[:2])
        if place == len(self.free):
            return None
        while place + 1 < len(self.free) and _can_be(self.free[place + 1][2]) < _can_be(self.free[place][2]):
            place += 1
        block = self.free[place][2]
        self.remove(block)
        return block


class CachingAllocator:
    """The blocks and segments of one device and one stream.

    Args:
        limit_bytes: No more than this is reserved; None for no limit.
        expandable: Whether segments are expandable.

    Attributes:
        reserved_bytes: Bytes of all segments.
        allocated_bytes: Bytes of all blocks that are in use.
        peak_reserved_bytes: The most that was reserved.
        peak_allocated_bytes: The most that was in use.
        n_flushes: How often free segments were given back because the limit was reached.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(3_000_000)
        >>> allocator.reserved_bytes, block.n_bytes
        (20971520, 3000320)
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.expandable = expandable
        self.reserved_bytes = self.allocated_bytes = 0
        self.peak_reserved_bytes = self.peak_allocated_bytes = 0
        self.n_flushes = 0
        self._pools = (_Pool(small=True), _Pool(small=False))
        self._next_address = 0

    def allocate(self, n_bytes: int) -> Block:
        """Hand out a block for a request.

        Raises:
            NoMemoryLeft: When the limit leaves no room.
        """
        size = max(-(-n_bytes // SMALLEST), 1) * SMALLEST
        pool = self._pools[size > SMALL_REQUEST]
        block = pool.take(size) or self._grow(pool, size)
        if block is None:
            self._flush()
            block = self._grow(pool, size)
        if block is None:
            limit = format_bytes(self.limit_bytes or 0)
            raise NoMemoryLeft(f"{format_bytes(size)} do not fit: {format_bytes(self.reserved_bytes)} of {limit} taken")
        self._split(block, size)
        self.allocated_bytes += block.n_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        self.allocated_bytes -= block.n_bytes
        self._join_free(block)

    def _join_free(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is not None and other.free:
                block.pool.remove(other)
                _join(block, other)
        block.pool.add(block)

    def _split(self, block: Block, size: int) -> None:
        least = SMALLEST if block.pool.small or self.expandable else SMALL_REQUEST + 1
        if block.n_bytes - size >= least:
            block.pool.add(_cut(block, size))

    def _grow(self, pool: _Pool, size: int) -> Block | None:
        return self._extend(pool, size) if self.expandable else self._new_segment(pool, size)

    def _new_segment(self, pool: _Pool, size: int) -> Block | None:
        n_bytes = segment_bytes(size)
        if not self._reserve(n_bytes):
            return None
        block = Block(self._next_address, n_bytes, pool)
        self._next_address += n_bytes + LARGE_GRANULE  # segments are not neighbours
        return block

    def _extend(self, pool: _Pool, size: int) -> Block | None:
        """Map pages where the free blocks and holes in a row, the lowest first, have addresses enough."""
        block = next(first for first in map(_first_of_row, pool.holes) if _is_roomy(first, size))
        if not block.mapped and not self._map(block, min(size, block.n_bytes)):
            return None
        while block.n_bytes < size:
            hole = block.after
            assert hole is not None
            if not self._map(hole, min(size - block.n_bytes, hole.n_bytes)):
                return None
            block = hole
        pool.remove(block)
        return block

    def _map(self, hole: Block, n_bytes: int) -> bool:
        """Map the first pages of a hole, which joins its free neighbours. Returns whether the limit allows it."""
        pool = hole.pool
        n_bytes = -(-n_bytes // pool.page) * pool.page
        if not self._reserve(n_bytes):
            return False
        place = pool.holes.index(hole)
        pool.holes[place : place + 1] = [_cut(hole, n_bytes)] if n_bytes < hole.n_bytes else []
        hole.mapped = True
        self._join_free(hole)
        return True

    def _reserve(self, n_bytes: int) -> bool:
        if self.limit_bytes is not None and self.reserved_bytes + n_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += n_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _flush(self) -> None:
        """Give free memory back: whole segments, or the whole pages of expandable ones."""
        self.n_flushes += 1
        for pool in self._pools:
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.n_bytes

    def _unmap(self, block: Block) -> None:
        """Make a hole of the whole pages within a free block."""
        pool = block.pool
        first = -(-block.address // pool.page) * pool.page
        end = (block.address + block.n_bytes) // pool.page * pool.page
        if end <= first:
            return
        pool.remove(block)
        self.reserved_bytes -= end - first
        hole = block
        if first > block.address:
            hole = _cut(block, first - block.address)
            pool.add(block)
        if hole.n_bytes > end - first:
            pool.add(_cut(hole, end - first))
        hole.mapped = False
        for other in (hole.before, hole.after):
            if other is not None and not other.mapped:
                pool.holes.remove(other)
                _join(hole, other)
        insort(pool.holes, hole, key=lambda each: each.address)


def _cut(block: Block, n_bytes: int) -> Block:
    """Leave so many bytes to a block. Returns the rest, its new neighbour."""
    begin, left = block.address + n_bytes, block.n_bytes - n_bytes
    rest = Block(begin, left, block.pool, mapped=block.mapped, before=block, after=block.after)
    if block.after is not None:
        block.after.before = rest
    block.after, block.n_bytes = rest, n_bytes
    return rest


def _join(block: Block, other: Block) -> None:
    """Add a neighbour's bytes to a block."""
    if other is block.before:
        block.address, block.before = other.address, other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block
    block.n_bytes += other.n_bytes


def _can_be(block: Block) -> int:
    """Bytes of a free block with the hole behind it."""
    return block.n_bytes + (block.after.n_bytes if block.after is not None and not block.after.mapped else 0)


def _first_of_row(hole: Block) -> Block:
    return hole.before if hole.before is not None and hole.before.free else hole


def _is_roomy(block: Block | None, size: int) -> bool:
    """Whether the free blocks and holes in a row have so many addresses."""
    while size > 0 and block is not None and (block.free or not block.mapped):
        size -= block.n_bytes
        block = block.after
    return size <= 0


def segment_bytes(size: int) -> int:
    """Bytes reserved for a rounded request that no free block can serve."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < LARGE_SEGMENT_BELOW:
        return LARGE_SEGMENT
    return -(-size // LARGE_GRANULE) * LARGE_GRANULE
