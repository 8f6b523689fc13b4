"""The allocator's rules one by one, and what never may happen under any order of requests."""

import random
from itertools import pairwise

import pytest

from ctdr_lightning.memory.allocator.caching_allocator import CachingAllocator, NoMemoryLeft

MIB = 1 << 20


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "segment_bytes"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB, 34 * MIB),  # a remainder of 1 MiB is not split off
    ],
)
def test_sizes_are_rounded_and_segments_have_their_sizes(request_bytes, block_bytes, segment_bytes):
    allocator = CachingAllocator()
    block = allocator.allocate(request_bytes)
    assert allocator.reserved_bytes == segment_bytes
    assert block.n_bytes == allocator.allocated_bytes == block_bytes


def test_the_smallest_free_block_that_fits_is_taken_and_the_lower_of_equals():
    allocator = CachingAllocator()
    large, small, other = (allocator.allocate(n * MIB) for n in (40, 12, 12))
    for block in (other, large, small):
        allocator.free(block)
    again = allocator.allocate(12 * MIB)
    assert again.address == small.address
    assert allocator.reserved_bytes == 64 * MIB


def test_neighbours_are_joined_and_segments_never():
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (parts[0], parts[2], parts[1], parts[3]):
        allocator.free(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(12 * MIB)
    allocator.allocate(12 * MIB)
    assert allocator.reserved_bytes == 44 * MIB


def test_free_segments_go_back_at_the_limit_and_split_ones_do_not():
    allocator = CachingAllocator(50 * MIB)
    whole, split = allocator.allocate(30 * MIB), allocator.allocate(6 * MIB)
    allocator.free(whole)
    allocator.allocate(28 * MIB)  # in the free 30
    with pytest.raises(NoMemoryLeft, match=r"32\.0 MiB do not fit"):
        allocator.allocate(32 * MIB)
    allocator.free(split)
    allocator.allocate(20 * MIB)
    assert allocator.n_flushes == 1
    assert allocator.reserved_bytes == 50 * MIB


@pytest.mark.parametrize(("expandable", "reserved_mib"), [(False, 160), (True, 100)])
def test_fragmentation_that_expandable_segments_mend(expandable, reserved_mib):
    allocator = CachingAllocator(expandable=expandable)
    blocks = [allocator.allocate(16 * MIB) for _ in range(6)]
    for block in blocks[1:5]:
        allocator.free(block)
    allocator.allocate(64 * MIB)
    assert allocator.reserved_bytes == reserved_mib * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit", [None, 160 * MIB])
@pytest.mark.parametrize("seed", range(8))
def test_no_two_blocks_overlap_and_the_sums_hold(seed, limit, expandable):
    draw = random.Random(seed)
    allocator = CachingAllocator(limit, expandable=expandable)
    held = []
    for _ in range(600):
        if held and draw.random() < 0.5:
            allocator.free(held.pop(draw.randrange(len(held))))
            continue
        try:
            held.append(allocator.allocate(int(10 ** draw.uniform(1, 7.5))))
        except NoMemoryLeft:
            assert limit is not None
        spans = sorted((b.address, b.address + b.n_bytes) for b in held)
        assert all(end <= first for (_, end), (first, _) in pairwise(spans))
        assert sum(b.n_bytes for b in held) == allocator.allocated_bytes <= allocator.reserved_bytes
        assert limit is None or allocator.reserved_bytes <= limit
    for block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0


def test_the_end_of_an_expandable_segment_is_taken_last():
    """PyTorch takes it for as large as it can grow: a larger block elsewhere fits better."""
    allocator = CachingAllocator(expandable=True)
    first, second = allocator.allocate(12 * MIB), allocator.allocate(4 * MIB)
    begin = first.address
    allocator.free(first)
    assert allocator.allocate(3 * MIB).address == begin  # 4 MiB are free at the end
    assert second.address == begin + 12 * MIB
    allocator.allocate(9 * MIB)
    assert allocator.allocate(3 * MIB).address == begin + 16 * MIB  # nothing else is left
    assert allocator.reserved_bytes == 20 * MIB


def test_holes_of_an_expandable_segment_are_mapped_again():
    allocator = CachingAllocator(120 * MIB, expandable=True)
    blocks = [allocator.allocate(20 * MIB) for _ in range(5)]
    for block in (blocks[1], blocks[3]):
        allocator.free(block)
    end = blocks[4].address + 20 * MIB
    assert allocator.allocate(40 * MIB).address == end  # 60 stay, and two holes of 20
    assert (allocator.n_flushes, allocator.reserved_bytes) == (1, 100 * MIB)
    begin = blocks[0].address
    for block in (blocks[0], blocks[2]):
        allocator.free(block)
    assert allocator.allocate(60 * MIB).address == begin  # a hole between two free blocks
    assert (allocator.n_flushes, allocator.reserved_bytes) == (1, 120 * MIB)


def test_of_a_free_block_the_whole_pages_are_unmapped():
    allocator = CachingAllocator(60 * MIB, expandable=True)
    first, second = allocator.allocate(10 * MIB), allocator.allocate(50 * MIB)
    allocator.free(second)
    with pytest.raises(NoMemoryLeft):
        allocator.allocate(51 * MIB)  # 70 MiB in four pages
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocate(50 * MIB).address == first.address + 10 * MIB
    assert allocator.reserved_bytes == 60 * MIB


def test_unmapped_neighbours_are_one_hole():
    allocator = CachingAllocator(60 * MIB, expandable=True)
    first, second, third = (allocator.allocate(20 * MIB) for _ in range(3))
    begin = first.address
    for block in (first, second):
        allocator.free(block)
        with pytest.raises(NoMemoryLeft):
            allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocate(40 * MIB).address == begin
    assert third.address == begin + 40 * MIB
