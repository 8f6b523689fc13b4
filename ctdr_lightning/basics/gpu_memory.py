"""A GPU at work: the counts of its allocator, read without flattening them, with peaks that outlive a reset.

torch keeps one peak a device. To know the peak within a single operation, it is set back before; the highest of the
peaks before that is kept here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from ctdr_lightning.basics.allocator_settings import EXPANDABLE, add_setting, allocator_settings, expandable_segments
from ctdr_lightning.basics.torch_private import set_cuda_allocator
from ctdr_lightning.basics.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes of a device's allocator.

    Attributes:
        allocated: In use now.
        allocated_peak: The most that were in use since the last reset.
        reserved: Taken from the device now.
        reserved_peak: The most that were taken since the last reset.
        requested: Of those in use the bytes that were asked for: a block may be up to a MiB larger than its tensor.
    """

    allocated: int = 0
    allocated_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    requested: int = 0

    def highest(self, other: Counts) -> Counts:
        """The same with the higher peaks of both."""
        peaks = (max(self.allocated_peak, other.allocated_peak), max(self.reserved_peak, other.reserved_peak))
        return Counts(self.allocated, peaks[0], self.reserved, peaks[1], self.requested)


# More than the allocator usually has free before a model is on the card, so that it maps a page.
_PROBE_BYTES = 32 << 20
_before: dict[int, Counts] = {}  # by the device's index: peaks that a reset of `watch_peak` has ended


def use_expandable_segments(device: torch.device) -> None:
    """Have CUDA's allocator map pages into growing segments, so that free memory in pieces serves a large tensor.

    Nothing changes where the environment names the setting or another backend, or where the driver maps no pages, as
    for some virtual GPUs.

    Args:
        device: Of the steps; nothing is done for another one than a GPU.
    """
    here = device.type == "cuda" and torch.cuda.is_available()
    if not here or EXPANDABLE in allocator_settings() or not expandable_segments():
        return
    set_cuda_allocator(add_setting(EXPANDABLE, "True"))
    try:
        torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pass  # no answer: the steps will tell
    except RuntimeError:
        set_cuda_allocator(add_setting(EXPANDABLE, "False"))


def counts(device: torch.device | None = None) -> Counts:
    """Counts since torch's last reset; all 0 before CUDA is in use.

    Args:
        device: A GPU; None is the current one.
    """
    found = torch.cuda.memory_stats_as_nested_dict(device)
    if not found:
        return Counts()
    used, taken, asked = (found[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved", "requested"))
    # cudaMallocAsync, which a user may choose, counts no requests.
    return Counts(used["current"], used["peak"], taken["current"], taken["peak"], asked["current"] or used["current"])


def watch_peak(device: torch.device | None = None) -> Counts:
    """Set torch's peaks back to the present bytes, for a moment's peak. Returns the counts before.

    Args:
        device: As for `counts`.
    """
    found, index = counts(device), _index(device)
    _before[index] = found.highest(_before.get(index, Counts()))
    torch.cuda.reset_peak_memory_stats(device)
    return found


def highest(device: torch.device | None = None) -> Counts:
    """Counts with the peaks since `begin_interval`, whatever was watched meanwhile.

    Args:
        device: As for `counts`.
    """
    return counts(device).highest(_before.get(_index(device), Counts()))


def begin_interval(device: torch.device | None = None) -> None:
    """Let the peaks of `highest` count from now on.

    Args:
        device: As for `counts`.
    """
    _before.pop(_index(device), None)
    torch.cuda.reset_peak_memory_stats(device)


def left_bytes(device: torch.device) -> int:
    """Bytes that PyTorch can still allocate: what is free on the card and in its own cache, as far as it may go.

    ``torch.cuda.mem_get_info`` alone counts neither the cache, which holds the card after a step that ran out of
    memory, nor the share of the card that ``torch.cuda.set_per_process_memory_fraction`` allows.

    Args:
        device: A GPU.
    """
    now, (free, total) = counts(device), torch.cuda.mem_get_info(device)
    allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # older releases have none
    return min(free + now.reserved, int(allowed * total)) - now.allocated


def free_cache() -> None:
    """Give the free blocks of CUDA's allocator back to the card; nothing where CUDA is not in use."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def read_budget(asked: int | float | str, device: torch.device) -> int:
    """A memory budget in bytes: of a GPU at most what its allocator can get, that is what is free and what it has.

    Args:
        asked: As for `parse_bytes`; a fraction is one of the whole card.
        device: The device of the steps.

    Raises:
        ConfigError: If it cannot be read.
    """
    if device.type != "cuda":
        return parse_bytes(asked)
    asked_bytes = parse_bytes(asked, total_bytes=torch.cuda.get_device_properties(device).total_memory)
    most_bytes = left_bytes(device) + counts(device).allocated
    if most_bytes < asked_bytes:
        warnings.warn(
            f"CTDR: memory_budget is {format_bytes(asked_bytes)}, but the GPU has {format_bytes(most_bytes)} for "
            "PyTorch: CUDA's context and other processes take the rest. Steps are planned for that.",
            stacklevel=2,
        )
    return min(asked_bytes, most_bytes)


def synchronize(device: torch.device) -> None:
    """Wait for all that a device was asked to do; a processor has done it.

    Args:
        device: Any device.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _index(device: torch.device | None) -> int:
    return torch.cuda.current_device() if device is None or device.index is None else device.index
