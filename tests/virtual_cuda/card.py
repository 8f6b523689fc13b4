"""A GPU's allocator and its queue, over numbers of the processor: bytes and seconds are told, nothing waits."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

from ctdr_lightning.basics import gpu_memory
from ctdr_lightning.basics.torch_private import TorchDispatchMode
from ctdr_lightning.memory.recorder import cuda_clock
from ctdr_lightning.memory.values.tensors import storage_of, tensors_in

HAND_OVER_S, FIRST_S, KERNEL_S, HERTZ = 20e-6, 5e-3, 5e-6, 1.5e9


class Card:
    """One GPU, whose host and whose kernels have a clock each.

    Args:
        base_bytes: In use from the start.
        live: Counts what is in use beside them; without it, `allocate` and `free` do.
        total_bytes: Of the card.
        elsewhere_bytes: Taken by the context and by other processes.
    """

    def __init__(self, base_bytes=0, live=None, total_bytes=80 << 30, elsewhere_bytes=0):
        self.base_bytes, self.live, self.own_bytes = base_bytes, live, 0
        self.total_bytes, self.elsewhere_bytes = total_bytes, elsewhere_bytes
        self.peak_bytes, self.slack_bytes = base_bytes, 0  # the slack: of blocks larger than their tensors
        self.host_s = self.device_s = 0.0

    def install(self, monkeypatch):
        """Put it in the place of ``torch.cuda`` until the test is over."""
        monkeypatch.setattr(gpu_memory, "_before", {})
        for name, value in {
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "get_device_properties": lambda device=None: SimpleNamespace(
                name="NVIDIA A100-SXM4-80GB", total_memory=self.total_bytes
            ),
            "memory_stats_as_nested_dict": lambda device=None: self.stats(),
            "memory_stats": refused,
            "reset_peak_memory_stats": lambda device=None: self.reset(),
            "get_per_process_memory_fraction": lambda device=None: 1.0,
            "mem_get_info": lambda device=None: (
                self.total_bytes - self.elsewhere_bytes - self.now_bytes,
                self.total_bytes,
            ),
            "synchronize": lambda device=None: self.wait(),
            "Event": lambda **_: Event(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda_clock, "keep_gpu_busy", lambda cycles: self.kernel(cycles / HERTZ))
        return self

    # Memory

    @property
    def now_bytes(self):
        return self.base_bytes + (self.own_bytes if self.live is None else self.live.now)

    def allocate(self, n_bytes):
        if self.now_bytes + n_bytes > self.total_bytes - self.elsewhere_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.own_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def free(self, n_bytes):
        self.own_bytes -= n_bytes

    def reset(self):
        self.peak_bytes = self.now_bytes

    def stats(self):
        found = {"current": self.now_bytes, "peak": max(self.peak_bytes, self.now_bytes)}
        requested = {"current": self.now_bytes - self.slack_bytes}
        return {
            "allocated_bytes": {"all": found}, "reserved_bytes": {"all": found}, "requested_bytes": {"all": requested},
        }  # fmt: skip

    # Time

    def kernel(self, seconds, host_s=HAND_OVER_S):
        """The host hands a kernel over, which runs once the ones before it are done."""
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + seconds

    def wait(self):
        self.host_s = max(self.host_s, self.device_s)


class Event:
    def __init__(self, card):
        self.card, self.at_s = card, 0.0

    def record(self, stream=None):
        self.card.kernel(0.0, 1e-6)
        self.at_s = self.card.device_s

    def query(self):
        return self.at_s <= self.card.host_s

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


class Kernels(TorchDispatchMode):
    """Runs ops on the processor, and on a card's queue and allocator what they would be there.

    Args:
        card: The card.
        seconds: Of kernels, by the op's full name.
        workspaces: Bytes, by the op's full name.
        hand_over_s: Time of the host for an op; for the first of a kind it is `FIRST_S`.
    """

    def __init__(self, card, seconds=None, workspaces=None, hand_over_s=HAND_OVER_S):
        super().__init__()
        self.hand_over_s = hand_over_s
        self.card, self.seconds, self.workspaces = card, seconds or {}, workspaces or {}
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        first = name not in self.calls
        self.calls.append(name)
        known = {storage_of(t)._cdata for t in tensors_in(args)}
        out = func(*args, **(kwargs or {}))
        workspace = self.workspaces.get(name, 0)
        self.card.allocate(workspace)
        for storage in map(storage_of, tensors_in(out if isinstance(out, tuple | list) else (out,))):
            if storage._cdata not in known:
                self.card.allocate(storage.nbytes())
                weakref.finalize(storage, self.card.free, storage.nbytes())
        self.card.free(workspace)
        self.card.kernel(self.seconds.get(name, KERNEL_S), FIRST_S if first else self.hand_over_s)
        return out


def refused(*_, **__):
    raise AssertionError("a hundred statistics are flattened for one number")
