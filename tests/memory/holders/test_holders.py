"""What every registered holder promises."""

import gc
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctdr_lightning.basics.errors import ConfigError, OffloadError
from ctdr_lightning.basics.torch_private import profiler_events
from ctdr_lightning.memory.holders import HOLDERS, HolderOptions, measure
from ctdr_lightning.memory.holders.base import Holders
from ctdr_lightning.memory.holders.disk import STAGING_BYTES
from ctdr_lightning.memory.holders.extents import Extents
from ctdr_lightning.memory.holders.measure import measure_links
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from tests.memory.holders.doubles import late_holders


@pytest.fixture(params=["as it is", "late"])
def holders(request, tmp_path):
    made = Holders(HolderOptions(folder=tmp_path)) if request.param == "as it is" else late_holders(1, tmp_path)
    yield made
    for name in HOLDERS:
        made[name].close()


SIZES = (1, 100, 4096, 4097, STAGING_BYTES // 4, STAGING_BYTES // 4 + 3)


@pytest.mark.parametrize("name", HOLDERS)
def test_every_bit_comes_back(holders, name):
    holder = holders[name]
    for dtype in (torch.float32, torch.uint8, torch.int64, torch.bool, torch.bfloat16):
        tensors = [(torch.randn(n) * 100).to(dtype) for n in SIZES]
        parcel = holder.put(tensors)
        parcel.gone()
        back = parcel.fetch()
        assert [t.dtype for t in back] == [dtype] * len(SIZES)
        assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@pytest.mark.parametrize("name", HOLDERS)
def test_the_source_may_be_written_over_once_it_is_gone(holders, name):
    source = torch.arange(100_000.0)
    want = source.clone()
    parcel = holders[name].put([source])
    parcel.gone()
    source.fill_(-1)
    assert torch.equal(parcel.fetch()[0], want)


@pytest.mark.parametrize("name", HOLDERS)
def test_the_asking_thread_frees_the_source(holders, name):
    """The profiler sees this thread alone; a step's peak is the plan's only where it frees at its own ticks."""
    n_bytes = 4 * 12_345
    with memory_profiler() as profiler:
        parcel = holders[name].put([torch.ones(12_345)])
        parcel.gone()
    freed = [event.nbytes() for event in profiler_events(profiler) if event.name() == "[memory]"]
    assert -n_bytes in freed


@pytest.mark.parametrize("name", HOLDERS)
def test_many_at_once_in_any_order_and_some_forgotten(holders, name):
    holder = holders[name]
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        sources = [torch.randn(int(torch.randint(1, 70_000, (), generator=draw))) for _ in range(12)]
        parcels = [holder.put([s]) for s in sources]
        for parcel in parcels[::3]:
            parcel.start()
        del parcel
        for i in torch.randperm(12, generator=draw).tolist():
            if i % 4 == 3:
                parcels[i] = None  # on its way, or on its way back
            else:
                assert torch.equal(parcels[i].fetch()[0], sources[i])
        parcels.clear()
        assert holder.held_bytes == 0
    assert 0 < holder.peak_bytes <= 3 * 12 * 4 * 75_000


@pytest.mark.parametrize("name", HOLDERS)
def test_a_parcel_can_be_fetched_twice(holders, name):
    parcel = holders[name].put([torch.arange(10.0)])
    first = parcel.fetch()[0]
    first.zero_()
    assert torch.equal(parcel.fetch()[0], torch.arange(10.0))


@pytest.mark.parametrize("name", HOLDERS)
def test_more_than_the_limit_is_an_error_that_says_so(tmp_path, name):
    holder = HOLDERS[name](HolderOptions(folder=tmp_path, limit_bytes=100_000))
    kept = holder.put([torch.zeros(20_000)])
    with pytest.raises(OffloadError, match="limit") as caught:
        holder.put([torch.zeros(20_000)])
    assert caught.value.hint
    assert torch.equal(kept.fetch()[0], torch.zeros(20_000))
    del kept
    gc.collect()
    assert holder.held_bytes == 0
    holder.close()


@pytest.mark.parametrize("name", HOLDERS)
def test_threads_end_with_the_holder(tmp_path, name):
    before = set(threading.enumerate())
    holder = HOLDERS[name](HolderOptions(folder=tmp_path))
    holder.put([torch.ones(10)]).fetch()
    holder.close()
    assert set(threading.enumerate()) <= before


def test_a_holder_is_made_when_it_is_asked_for(tmp_path):
    holders = Holders(HolderOptions(folder=tmp_path))
    assert holders.made == ()
    assert holders["disk"] is holders["disk"]
    assert len(holders.made) == 1
    holders.close()
    assert holders.made == ()
    with pytest.raises(ConfigError, match="disk"):
        holders["disc"]


def test_links_are_measured(tmp_path):
    for link in measure_links(HOLDERS, HolderOptions(folder=tmp_path)):
        assert min(link.out_bytes_per_s, link.in_bytes_per_s) > 1e6
        assert link.device_bytes == (2 * STAGING_BYTES if link.to == "disk" else 0)
        assert 0 <= link.busy_s_per_byte < 1e-7


def test_a_links_latency_is_what_a_small_transfer_takes(monkeypatch):
    """A link of 50 us and 1 ns a byte: both are found, on the way out and back."""
    clock = [0.0]

    def passes(n_bytes):
        clock[0] += 5e-5 + 1e-9 * n_bytes

    class Linked:
        device_bytes = 0

        def put(self, tensors):
            n_bytes = tensors[0].nbytes
            return SimpleNamespace(gone=lambda: passes(n_bytes), fetch=lambda: passes(n_bytes))

    monkeypatch.setattr(measure, "_now", lambda device: clock[0])
    monkeypatch.setattr(measure, "_busy_s_per_byte", lambda *_: 0.0)
    link = measure._link("host", Linked(), HolderOptions())
    assert link.latency_s == pytest.approx(5e-5)
    assert (link.out_bytes_per_s, link.in_bytes_per_s) == pytest.approx((1e9, 1e9))


class _Interfering:
    """A holder whose transfers take their time from whoever computes meanwhile: a computer and a holder at once."""

    def __init__(self, transfer_s):
        self._transfer_s = transfer_s
        self._owed_s = 0.0

    def put(self, tensors):
        self._start()
        return SimpleNamespace(gone=lambda: None, start=self._start, fetch=lambda: None)

    def _start(self):
        self._owed_s += self._transfer_s

    def seconds(self):
        owed_s, self._owed_s = self._owed_s, 0.0
        return 1e-3 + owed_s


@pytest.mark.parametrize(("transfer_s", "per_byte_s"), [(2e-3, 2e-6), (0.0, 0.0)])
def test_computing_beside_a_transfer_is_compared_with_computing_alone(transfer_s, per_byte_s, monkeypatch):
    both = _Interfering(transfer_s)
    monkeypatch.setattr(measure, "_Computing", lambda at_least_s: both)
    source = torch.zeros(1000, dtype=torch.uint8)
    assert measure._busy_s_per_byte(both, source, 1e-3) == pytest.approx(per_byte_s)


def test_the_file_has_no_name(tmp_path):
    disk = HOLDERS["disk"](HolderOptions(folder=tmp_path))
    parcel = disk.put([torch.ones(100_000)])
    parcel.gone()
    assert list(tmp_path.iterdir()) == []
    disk.close()


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_folder"):
        HOLDERS["disk"](HolderOptions(folder=tmp_path / "file" / "below"))


def test_a_full_disk_is_an_error_and_the_next_parcel_may_fit(tmp_path, monkeypatch):
    disk = HOLDERS["disk"](HolderOptions(folder=tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", _no_space)
    with pytest.raises(OffloadError, match="no room"):
        disk.put([torch.ones(100)])
    monkeypatch.undo()
    assert disk.held_bytes == 0
    assert torch.equal(disk.put([torch.ones(100)]).fetch()[0], torch.ones(100))
    disk.close()


def _no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_is_an_error_of_ours(tmp_path, monkeypatch, call):
    disk = HOLDERS["disk"](HolderOptions(folder=tmp_path))

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OffloadError, match="Input/output"):
        disk.put([torch.ones(100)]).fetch()
    disk.close()


@pytest.mark.slow
def test_a_killed_process_leaves_no_file_behind(tmp_path):
    program = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from ctdr_lightning.memory.holders import HOLDERS, HolderOptions\n"
        "disk = HOLDERS['disk'](HolderOptions(folder=Path(sys.argv[1])))\n"
        "parcels = [disk.put([torch.ones(1000000)]) for _ in range(4)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.integers(1, 20_000) | st.none(), max_size=60), st.randoms())
def test_extents_never_overlap_and_are_reused(wishes, draw):
    extents, taken = Extents(4096), {}
    for n_bytes in wishes:
        if n_bytes is None and taken:
            start = draw.choice(sorted(taken))
            extents.give_back(start, taken.pop(start))
        elif n_bytes is not None:
            start = extents.take(n_bytes)
            assert start % 4096 == 0
            assert start + extents.round_up(n_bytes) <= extents.size
            assert all(
                start >= other + extents.round_up(length) or other >= start + extents.round_up(n_bytes)
                for other, length in taken.items()
            )
            taken[start] = n_bytes
    for start, length in taken.items():
        extents.give_back(start, length)
    assert not extents.size or extents.take(extents.size) == 0
