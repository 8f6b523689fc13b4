"""The paper's heuristic: nothing overlaps, and known cases come out as they must."""

import random

import pytest

from ctdr_lightning.memory.allocator.blocks import Lifetime
from ctdr_lightning.memory.allocator.packing import pack


def overlap(a, b):
    return a.first <= b.last and b.first <= a.last


@pytest.mark.parametrize("seed", range(10))
def test_no_two_requests_overlap_in_time_and_address(seed):
    draw = random.Random(seed)
    requests = []
    for _ in range(120):
        first = draw.randrange(80)
        requests.append(Lifetime(512 * draw.randrange(1, 40), first, first + draw.randrange(30)))
    arena = pack(requests)
    for i, one in enumerate(requests):
        assert 0 <= arena.offsets[i] <= arena.n_bytes - one.n_bytes
        for j, other in enumerate(requests[:i]):
            apart = (
                arena.offsets[i] + one.n_bytes <= arena.offsets[j]
                or arena.offsets[j] + other.n_bytes <= arena.offsets[i]
            )
            assert apart or not overlap(one, other)
    assert arena.live_bytes <= arena.n_bytes <= 1.3 * arena.live_bytes


def test_requests_of_a_stack_take_what_is_live():
    requests = [Lifetime(1024 * (i + 1), i, 20 - i) for i in range(8)]
    arena = pack(requests)
    assert arena.n_bytes == arena.live_bytes == sum(r.n_bytes for r in requests)


def test_of_the_lowest_stretch_the_longest_lifetime_comes_first():
    arena = pack([Lifetime(512, 0, 3), Lifetime(512, 0, 9), Lifetime(512, 4, 9)])
    assert arena.offsets == (512, 0, 512)
    assert arena.n_bytes == 1024


def test_nothing_takes_nothing():
    assert pack([]).n_bytes == 0
