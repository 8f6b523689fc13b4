"""The true CPU peak: the running sum of the profiler's allocation events."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from itertools import accumulate

from torch import nn
from torch.autograd import DeviceType

from ctdr_lightning.basics.torch_private import profiler_events
from ctdr_lightning.memory.recorder.profiler import memory_profiler

_KEEPING = {-1: 2**31 - 1, -2: 2**28, -3: 2**25}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Let the process keep what it frees, as a GPU's caching allocator does.

    Otherwise glibc gives memory back and takes it again within each step, which costs up to a tenth of it, more or less
    by what ran before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, n_bytes in _KEEPING.items():
            mallopt(option, n_bytes)


def cpu_peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes live on the CPU while ``run`` runs, above what was live at its start."""
    gc.collect()  # garbage from before that is freed meanwhile would count as less than nothing
    with memory_profiler() as profiler:
        run()
    events = [e for e in profiler_events(profiler) if e.name() == "[memory]"]
    on_cpu = [e for e in sorted(events, key=lambda e: e.start_ns()) if e.device_type() == DeviceType.CPU]
    return max(accumulate((e.nbytes() for e in on_cpu), initial=0))


def step_peak_bytes(net: nn.Module, run: Callable[[], object]) -> int:
    """Peak of a step above weights and inputs, new gradients included; run once before, so that caches are warm."""
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        run_peak = cpu_peak_bytes(run)
    net.zero_grad(set_to_none=True)
    return run_peak
