"""Host memory in few arenas: counted, within a quarter of the need, with a limit, and let go of."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctdr_lightning.basics import host_memory
from ctdr_lightning.basics.errors import OffloadError
from ctdr_lightning.memory.holders import HOLDERS, HolderOptions, host
from ctdr_lightning.memory.holders.arenas import Arenas
from ctdr_lightning.memory.holders.base import Holders
from ctdr_lightning.memory.holders.pinned import pin


def plain(n_bytes):
    """Memory that the system gives when it is written to."""
    return torch.empty(n_bytes, dtype=torch.uint8)


def tokens(draw):
    """One activation of twelve layers in bfloat16."""
    return [16 * draw.randint(64, 512) * 768 * 2] * 12


def attention(draw):
    """All that a layer of a transformer saves."""
    n = draw.randint(64, 512)
    return [16 * n * 768 * 2, 16 * n * 3072 * 2, 16 * 12 * n * n * 2, 16 * n * 768 * 4, 16 * n * 4] * 12


def pictures(draw):
    """The levels of a convolutional net."""
    size = draw.choice(range(128, 321, 16))
    levels = ((64, 2), (64, 4), (256, 4), (128, 8), (512, 8), (256, 16), (1024, 16), (512, 32), (2048, 32))
    return [32 * c * (size // r) ** 2 * 2 for c, r in levels for _ in range(3)]


@pytest.mark.parametrize("scale", [1, 64])
@pytest.mark.parametrize("kind", [tokens, attention, pictures])
def test_200_random_lengths_pin_no_more_than_a_quarter_above_the_need(kind, scale):
    for seed in range(4):
        draw, arenas, sizes = random.Random(seed), Arenas(plain), []
        n_parts = n_tensors = 0
        for _ in range(200):
            taken = [arenas.take(n // scale) for n in kind(draw)]
            n_tensors, n_parts = n_tensors + len(taken), n_parts + sum(map(len, taken))
            draw.shuffle(taken)
            for parts in taken:
                arenas.give_back(parts)
            sizes.append(arenas.allocated_bytes)
        assert arenas.taken_bytes == 0
        assert arenas.most_allocated_bytes <= 1.25 * arenas.most_taken_bytes
        assert len(set(sizes)) <= 25  # few are ever pinned, in all steps together
        assert n_parts <= 1.5 * n_tensors


@given(st.lists(st.integers(1, 400_000) | st.none(), max_size=60), st.randoms())
def test_parts_never_overlap_and_hold_what_was_asked_for(wishes, draw):
    arenas, taken = Arenas(plain), []
    for n_bytes in wishes:
        if n_bytes is None and taken:
            arenas.give_back(taken.pop(draw.randrange(len(taken))))
        elif n_bytes is not None:
            taken.append(arenas.take(n_bytes))
            assert n_bytes <= sum(part.memory.nbytes for part in taken[-1]) < n_bytes + 512
    parts = [part for parts in taken for part in parts]
    for number, part in enumerate(parts):
        part.memory.fill_(number % 251)
    assert all((part.memory == number % 251).all() for number, part in enumerate(parts))
    assert arenas.taken_bytes == sum(part.memory.nbytes for part in parts)
    for some in taken:
        arenas.give_back(some)
    arenas.trim()
    assert (arenas.taken_bytes, arenas.allocated_bytes) == (0, 0)


def test_what_lies_free_is_let_go_of_before_the_limit_is_an_error():
    freed = []
    arenas = Arenas(plain, limit_bytes=1_200_000, freed=lambda: freed.append(arenas.allocated_bytes))
    small = [arenas.take(100_000) for _ in range(8)]
    for parts in small:
        arenas.give_back(parts)
    del small
    large = arenas.take(1_100_000)
    assert arenas.allocated_bytes <= 1_200_000
    with pytest.raises(OffloadError, match=r"limit is 1\.1 MiB"):
        arenas.take(600_000)
    arenas.give_back(large)
    assert arenas.taken_bytes == 0


def test_trimming_keeps_what_is_in_use_and_what_is_asked_for():
    freed = []
    arenas = Arenas(plain, freed=lambda: freed.append(True))
    kept, gone = arenas.take(1 << 20), [arenas.take(1 << 20) for _ in range(4)]
    for parts in gone:
        arenas.give_back(parts)
    arenas.trim(arenas.allocated_bytes)
    assert not freed
    arenas.trim(2 << 20)
    assert freed == [True]
    assert 1 << 20 <= arenas.allocated_bytes <= 2 << 20
    kept[0].memory.fill_(1)


def test_memory_that_cannot_be_pinned_is_no_device_out_of_memory(monkeypatch):
    def fails(*_, **options):
        assert options["pin_memory"]
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(OffloadError, match=r"4\.0 MiB of host memory could not be pinned") as caught:
        pin(4 << 20)
    assert "ulimit -l" in caught.value.hint


def test_holders_trim_what_can_be_trimmed(tmp_path):
    holders = Holders(HolderOptions(folder=tmp_path))
    for name in HOLDERS:
        holders[name].put([torch.ones(1 << 20)]).fetch()
    assert holders["host"].pinned_bytes == 4 << 20
    holders.trim({"host": 4 << 20})
    assert holders["host"].pinned_bytes == 4 << 20
    holders.trim({})
    assert holders["host"].pinned_bytes == 0
    assert holders.most_pinned_bytes == holders["host"].most_pinned_bytes == 4 << 20
    holders.close()


@pytest.mark.parametrize(
    ("environment", "world", "gpus", "processes"),
    [({"LOCAL_WORLD_SIZE": "8"}, 64, 8, 8), ({}, 64, 8, 8), ({}, 2, 8, 2), ({}, 1, 8, 1), ({}, 4, 0, 1)],
)
def test_half_of_what_is_free_is_shared_by_the_processes_of_a_machine(
    environment, world, gpus, processes, monkeypatch, tmp_path
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(host_memory, "has_process_group", lambda: True)
    monkeypatch.setattr(torch, "distributed", SimpleNamespace(get_world_size=lambda: world))
    monkeypatch.setattr(host_memory, "_available", lambda: 64 << 30)
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert host_memory.pinnable_bytes() == (32 << 30) // processes
    (tmp_path / "memory.max").write_text(str(20 << 30))
    (tmp_path / "memory.current").write_text(str(14 << 30))
    (tmp_path / "memory.stat").write_text(f"inactive_file {2 << 30}\nanon 1\n")
    assert host_memory.pinnable_bytes() == (4 << 30) // processes
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.pinnable_bytes() == (32 << 30) // processes


def test_a_gpus_host_has_the_limit_by_default(monkeypatch):
    class Nothing:
        def close(self):
            pass

    monkeypatch.setattr(host, "StreamLane", Nothing)
    monkeypatch.setattr(host, "pinnable_bytes", lambda: 1 << 20)
    with pytest.raises(OffloadError, match=r"limit is 1\.0 MiB"):
        HOLDERS["host"](HolderOptions(device="cuda")).take(2 << 20)
