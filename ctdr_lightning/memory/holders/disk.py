"""A disk as a place for tensors: one preallocated file, past the page cache, one thread to write and one to read.

The page cache is host memory, so a file in it would be a host pool under another name: the file is opened with O_DIRECT
where the file system allows it. Writes and reads go through aligned staging buffers of 2 MiB each, as torch's tensors
are aligned to 64 bytes and O_DIRECT wants 4096. On a GPU they are pinned, and bytes pass between them and the device on
streams of their own, behind the work of the step that was asked for before; the disk's threads wait for these copies,
never the step's stream. The file has no name once it is open: the system frees it when the process ends, however it
ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import ConfigError, OffloadError
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.holders.base import HOLDERS, HolderOptions, as_bytes
from ctdr_lightning.memory.holders.extents import Extents
from ctdr_lightning.memory.holders.lanes import DirectLane, Lane, Moment, StreamLane
from ctdr_lightning.memory.holders.pinned import pin

# A page: direct reads and writes of a file must begin and end at one.
GRANULE = 4096
# Tried 0.25, 1, 2, 4, 8 MiB: from 1 MiB on the rate is that of the disk; 2 MiB keeps both buffers at 4 MiB.
STAGING_BYTES = 2 * 2**20
_BUFFERED = {errno.EINVAL, errno.EOPNOTSUPP}


class DiskFile:
    """A nameless file that is read and written in aligned blocks.

    Args:
        folder: Where it is made.

    Attributes:
        direct: Whether it goes past the page cache.

    Raises:
        ConfigError: If no file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="ctdr-offload-", dir=folder)
        except OSError as error:
            raise ConfigError(
                f"disk_folder={str(folder)!r}: no file can be made there ({error.strerror}).", "Choose another folder."
            ) from error
        try:
            self._file, self.direct = self._reopen(handle, name)
        finally:
            os.unlink(name)
        self._size = 0

    @staticmethod
    def _reopen(handle: int, name: str) -> tuple[int, bool]:
        try:
            direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno not in _BUFFERED:
                raise
            return handle, False
        os.close(handle)
        return direct, hasattr(os, "O_DIRECT")

    def grow(self, size: int) -> None:
        """Make it at least so long.

        Raises:
            OffloadError: If the disk is full.
        """
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self._file, self._size, size - self._size)
        except OSError as error:
            raise OffloadError(
                f"The disk has no room for {format_bytes(size)} of offloaded tensors ({error.strerror}).",
                "Choose another disk_folder, a larger memory_budget, or a smaller batch.",
            ) from error
        self._size = size

    def write(self, block: memoryview, offset: int) -> None:
        """Write a block whose length and place are multiples of the granule."""
        done = 0
        while done < len(block):
            done += os.pwrite(self._file, block[done:], offset + done)

    def read(self, block: memoryview, offset: int) -> None:
        """Read a block whose length and place are multiples of the granule."""
        done = 0
        while done < len(block):
            n = os.preadv(self._file, [block[done:]], offset + done)
            if not n:
                raise OSError(errno.EIO, "the file is shorter than the data written")
            done += n

    def close(self) -> None:
        """Close it, which frees its bytes."""
        os.close(self._file)


class _Staging:
    """A buffer, aligned to pages, that a thread copies through."""

    def __init__(self, *, pinned: bool) -> None:
        if not pinned:
            self.tensor = torch.frombuffer(mmap.mmap(-1, STAGING_BYTES), dtype=torch.uint8)
        else:
            memory = pin(STAGING_BYTES + GRANULE)
            begin = -memory.data_ptr() % GRANULE
            self.tensor = memory[begin : begin + STAGING_BYTES]
        # a page of the system is 4096 bytes or a multiple
        self.view = memoryview((ctypes.c_char * STAGING_BYTES).from_address(self.tensor.data_ptr())).cast("B")


class _Stored:
    """One parcel on the disk."""

    def __init__(self, disk: Disk, tensors: Sequence[Tensor]) -> None:
        self.n_bytes = sum(disk.extents.round_up(t.nbytes) for t in tensors)
        self._disk = disk
        self._kinds = [(t.numel(), t.dtype, t.device) for t in tensors]
        self._places: list[tuple[int, int]] = []
        disk.admit(self.n_bytes)
        for tensor in tensors:
            self._places.append((disk.extents.take(tensor.nbytes), tensor.nbytes))
        self._written: Future[None] | None = None
        self._read: Future[None] | None = None
        self._landing: list[Tensor] = []
        disk.grow()
        self._asked = disk.out.moment(tensors)
        # the asking thread frees them, in gone(): otherwise bytes would be there longer or shorter by the disk's speed
        self._sources = [as_bytes(t) for t in tensors]
        self._written = disk.writer.submit(disk.write_all, list(self._sources), list(self._places), self._asked)

    def gone(self) -> None:
        """Wait until it is written; then the sources are let go."""
        assert self._written is not None, "nothing was put"
        _result(self._written, "written to")
        self._sources = []

    def start(self) -> list[Tensor]:
        """Allocate where it lands and start to read."""
        if self._read is not None:
            return self._landing
        with self._asked.at_home():
            self._landing = [torch.empty(n, dtype=dtype, device=device) for n, dtype, device in self._kinds]
            # freed memory may still be read by earlier work of the step
            free = self._disk.back.moment(self._landing)
        targets = [as_bytes(t) for t in self._landing]
        assert self._written is not None, "nothing was put"
        self._read = self._disk.reader.submit(self._disk.read_all, targets, list(self._places), self._written, free)
        return self._landing

    def fetch(self) -> list[Tensor]:
        """Wait until it is read."""
        self.start()
        assert self._read is not None, "start() reads"
        _result(self._read, "read from")
        landing, self._landing = self._landing, []
        self._asked.hand_out(landing)
        self._read = None
        return landing

    def __del__(self) -> None:
        # One writer writes in order, so that a later parcel's bytes come after ours in the same place. A read of ours
        # that is still under way lands in a buffer that nobody looks at.
        for start, n_bytes in self._places:
            self._disk.extents.give_back(start, n_bytes)
        self._disk.held_bytes -= self.n_bytes if self._places else 0


def _result(future: Future[None], done: str) -> None:
    try:
        future.result()
    except OSError as error:
        raise OffloadError(
            f"An offloaded tensor could not be {done} the disk: {error.strerror or error}.",
            "Choose another disk_folder, or offload to the host.",
        ) from error


class Disk:
    """Holds tensors in one file.

    Args:
        options: Folder, limit and device.

    Attributes:
        held_bytes: Bytes in the file that are taken.
        peak_bytes: The most that were.
        device_bytes: The staging buffers, where the step runs in host memory.
        delay: Called with a job's bytes before each transfer; the tests' slow and random links.
    """

    def __init__(self, options: HolderOptions) -> None:
        self._options = options
        self._file = DiskFile(options.folder or Path(tempfile.gettempdir()))
        self.direct = self._file.direct
        self.extents = Extents(GRANULE)
        self.writer = ThreadPoolExecutor(1, "ctdr-disk-writer")
        self.reader = ThreadPoolExecutor(1, "ctdr-disk-reader")
        on_gpu = options.device == "cuda"
        self.out: Lane = StreamLane() if on_gpu else DirectLane()
        self.back: Lane = StreamLane() if on_gpu else DirectLane()
        self._out, self._in = _Staging(pinned=on_gpu), _Staging(pinned=on_gpu)
        self.held_bytes = self.peak_bytes = 0
        self.device_bytes = 2 * STAGING_BYTES if options.device == "cpu" else 0
        self.rate_bytes_per_s: float | None = None

    def put(self, tensors: Sequence[Tensor]) -> _Stored:
        """Start to write tensors."""
        return _Stored(self, tensors)

    def admit(self, n_bytes: int) -> None:
        """Count bytes that are about to be held.

        Raises:
            OffloadError: If it is more than the limit.
        """
        limit = self._options.limit_bytes
        if limit is not None and self.held_bytes + n_bytes > limit:
            raise OffloadError(
                f"Offloaded tensors take {format_bytes(self.held_bytes + n_bytes)} on disk, the limit is "
                f"{format_bytes(limit)}.",
                "Raise the limit, or the memory_budget.",
            )
        self.held_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def grow(self) -> None:
        """Make the file as long as its extents."""
        self._file.grow(self.extents.size)

    def write_all(self, sources: list[Tensor], places: list[tuple[int, int]], ready: Moment) -> None:
        """On the writer's thread: tensors that are made by a moment to the file, through the staging buffer."""
        staging = self._out
        for start, n_bytes in places:
            source = sources.pop(0)  # the pool's thread keeps its arguments for a moment after the result is there
            begin_s = time.perf_counter()
            for done in range(0, n_bytes, STAGING_BYTES):
                length = min(STAGING_BYTES, n_bytes - done)
                self.out.copy([(staging.tensor[:length], source[done : done + length])], moment=ready).finish()
                self._file.write(staging.view[: self.extents.round_up(length)], start + done)
            self._throttle(n_bytes, begin_s)

    def read_all(
        self, targets: list[Tensor], places: list[tuple[int, int]], written: Future[None], free: Moment
    ) -> None:
        """On the reader's thread: the file to tensors whose memory is free at a moment, through the staging buffer."""
        written.result()
        staging = self._in
        for start, n_bytes in places:
            target = targets.pop(0)
            begin_s = time.perf_counter()
            for done in range(0, n_bytes, STAGING_BYTES):
                length = min(STAGING_BYTES, n_bytes - done)
                self._file.read(staging.view[: self.extents.round_up(length)], start + done)
                self.back.copy([(target[done : done + length], staging.tensor[:length])], moment=free).finish()
            self._throttle(n_bytes, begin_s)

    def _throttle(self, n_bytes: int, begin_s: float) -> None:
        """Sleep until the transfer has taken as long as a slower link would."""
        if self.rate_bytes_per_s is not None:
            time.sleep(max(n_bytes / self.rate_bytes_per_s - (time.perf_counter() - begin_s), 0.0))

    def close(self) -> None:
        """Finish pending work, end the threads, free the file."""
        self.writer.shutdown(wait=True, cancel_futures=True)
        self.reader.shutdown(wait=True, cancel_futures=True)
        self.out.close()
        self.back.close()
        self._file.close()


HOLDERS.register("disk")(Disk)
