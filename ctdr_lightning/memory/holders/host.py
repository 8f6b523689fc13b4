"""Host memory as a place for a GPU's tensors: pinned buffers, reused over steps, copied on streams of their own.

On a GPU a copy is asked for on a side stream behind the work that made the tensor, and the step's stream waits for its
event: before the source is let go, and before what came back is read. Pinning memory synchronises the device, so a
buffer is pinned once and kept. Where the step runs on the processor the same is done by two threads, so that it can be
tested; there it saves nothing, as both sides are host memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import OffloadError
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.holders.base import HOLDERS, HolderOptions, as_bytes
from ctdr_lightning.memory.holders.lanes import Lane, StreamLane, ThreadLane, Ticket

GRANULE = 512


class _Buffer:
    """A pinned buffer, and the last copy that reads or writes it."""

    __slots__ = ("last", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Ticket | None = None


class _Pinned:
    """One parcel in host memory."""

    def __init__(self, host: Host, tensors: Sequence[Tensor]) -> None:
        self._host = host
        self._kinds = [(t.numel(), t.dtype, t.device) for t in tensors]
        self._buffers: list[_Buffer] = []
        self._sources: list[Tensor] = []
        self._landing: list[Tensor] = []
        self.n_bytes = 0
        for tensor in tensors:
            buffer = host.take(tensor.nbytes)
            self._buffers.append(buffer)
            self.n_bytes += buffer.memory.nbytes
            source = as_bytes(tensor)
            buffer.last = host.out.copy(buffer.memory[: source.nbytes], source, buffer.last)
            self._sources.append(source)

    def gone(self) -> None:
        """Wait until it is copied; then the sources are let go."""
        for buffer in self._buffers if self._sources else ():
            assert buffer.last is not None, "nothing was put"
            buffer.last.wait()
        self._sources = []

    def start(self) -> list[Tensor]:
        """Allocate where it lands and start to copy."""
        if self._landing:
            return self._landing
        for (n, dtype, device), buffer in zip(self._kinds, self._buffers, strict=True):
            landing = torch.empty(n, dtype=dtype, device=device)
            target = as_bytes(landing)
            buffer.last = self._host.back.copy(target, buffer.memory[: target.nbytes], buffer.last)
            self._landing.append(landing)
        return self._landing

    def fetch(self) -> list[Tensor]:
        """Wait until it is copied."""
        self.start()
        for buffer in self._buffers:
            assert buffer.last is not None, "start() copies"
            buffer.last.wait()
        landing, self._landing = self._landing, []
        return landing

    def __del__(self) -> None:
        if self._sources or self._landing:  # forgotten on its way: the memory must outlive the copy
            for buffer in self._buffers:
                if buffer.last is not None:
                    buffer.last.wait()
        for buffer in self._buffers:
            self._host.give_back(buffer)


class Host:
    """Holds tensors in pinned host memory.

    Args:
        options: Limit and device.

    Attributes:
        held_bytes: Bytes of the buffers that are in use.
        peak_bytes: The most that were; the pool keeps so many.
        device_bytes: None of the device's memory is taken all along.
    """

    def __init__(self, options: HolderOptions) -> None:
        self._options = options
        self._on_gpu = options.device == "cuda"
        self.out: Lane = StreamLane() if self._on_gpu else ThreadLane("ctdr-host-out")
        self.back: Lane = StreamLane() if self._on_gpu else ThreadLane("ctdr-host-back")
        self._free: dict[int, list[_Buffer]] = defaultdict(list)
        self.held_bytes = self.peak_bytes = self.device_bytes = 0

    def put(self, tensors: Sequence[Tensor]) -> _Pinned:
        """Start to copy tensors."""
        return _Pinned(self, tensors)

    def take(self, n_bytes: int) -> _Buffer:
        """A buffer of at least so many bytes, from the pool where it has one.

        Raises:
            OffloadError: When the limit is reached.
        """
        size = max(-(-n_bytes // GRANULE), 1) * GRANULE
        limit = self._options.limit_bytes
        if limit is not None and self.held_bytes + size > limit:
            raise OffloadError(
                f"Offloaded tensors take {format_bytes(self.held_bytes + size)} of host memory, the limit is "
                f"{format_bytes(limit)}.",
                "Raise the limit, offload to disk as well, or raise the memory_budget.",
            )
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        pool = self._free[size]
        return pool.pop() if pool else _Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu))

    def give_back(self, buffer: _Buffer) -> None:
        """A buffer is free again; the next copy into it waits for the last one out of it."""
        self.held_bytes -= buffer.memory.nbytes
        self._free[buffer.memory.nbytes].append(buffer)

    def close(self) -> None:
        """Wait for all copies and free the pool."""
        self.out.close()
        self.back.close()
        self._free.clear()


HOLDERS.register("host")(Host)
