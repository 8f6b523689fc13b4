"""Memory of this machine: how much is free, the share that one process may take, and what a function takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ctdr_lightning.basics.torch_private import start_watching, stop_watching

_CGROUP = Path("/sys/fs/cgroup")
# Pinned memory cannot be swapped, and data loaders and the page cache live from the rest.
PINNED_SHARE = 0.5


def free_host_bytes() -> int | None:
    """Memory that new processes can have, by the kernel and by the limit of this container.

    Returns:
        Bytes; None where the system does not say.
    """
    known = [n for n in (_available(), _left_in_group()) if n is not None]
    return min(known) if known else None


def pinnable_bytes() -> int | None:
    """Bytes that this process may pin by default: half of the free memory, divided by the processes on this machine.

    Returns:
        Bytes; None where the system does not say how much is free.
    """
    free = free_host_bytes()
    return None if free is None else int(PINNED_SHARE * free) // processes_here()


def processes_here() -> int:
    """Number of this training's processes on this machine; one per GPU if the launcher does not say."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    if said.isdigit():
        return max(int(said), 1)
    world = torch.distributed.get_world_size() if has_process_group() else 1
    return max(min(world, torch.cuda.device_count() or 1), 1)


def has_process_group() -> bool:
    """Whether this process trains with others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


def _left_in_group() -> int | None:
    """Bytes below the limit of a container, files that the kernel can drop counted as free."""
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(int(limit) - int(used) + int(stat.get("inactive_file", 0)), 0) if limit.isdigit() else None


def allocations_of(run: Callable[[], object]) -> list[int]:
    """Run a function in a thread of its own, undisturbed by any running profiler, and record its memory.

    Args:
        run: The function; no mode of the calling thread is active in it.

    Returns:
        As `stop_watching`.
    """

    def watched() -> list[int]:
        start_watching()
        try:
            run()
        finally:
            sizes = stop_watching()
        return sizes

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(watched).result()
