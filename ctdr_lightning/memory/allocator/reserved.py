"""What CUDA's allocator reserves for a step: the question of DNNMem and xMem, asked of a plan.

Gao et al., "Estimating GPU Memory Consumption of Deep Learning Models" (DNNMem), ESEC/FSE 2020; Shi et al., "xMem",
2025.

Reproduced: the step's requests and releases in order are played through a model of the framework's own allocator, so
    that rounding, segments and fragmentation count, and not tensors alone.
Modelled: the CUDA context, which takes some hundred MiB besides, is not part of it, nor are libraries' workspaces that
    the trace does not hold.
Left out: other frameworks, and other processes on the device.

Complexity: O(n log n) in the requests; 0.3 s for a step of 3,158 ops where tried, most of it for the packing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.allocator.blocks import Lifetime, lifetimes
from ctdr_lightning.memory.allocator.caching_allocator import Block, CachingAllocator, NoMemoryLeft
from ctdr_lightning.memory.allocator.packing import pack
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.traces.trace import Trace

# A step finds the free blocks of the one before it. Of six torchvision nets none reserved more after its first step.
N_STEPS = 2


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the allocator makes of a step.

    Attributes:
        allocated_bytes: Peak of the blocks that are in use: tensors, rounded.
        reserved_bytes: Peak of the segments, which other processes cannot use.
        expandable_bytes: The same with expandable segments.
        packed_bytes: Size of an arena with static addresses; nearly the least that any allocator needs.
    """

    allocated_bytes: int
    reserved_bytes: int
    expandable_bytes: int
    packed_bytes: int

    @property
    def fragmentation(self) -> float:
        """By which share more is reserved than is in use."""
        return self.reserved_bytes / self.allocated_bytes - 1 if self.allocated_bytes else 0.0

    def __str__(self) -> str:
        """The figures in one sentence."""
        reserved, expandable, packed = map(
            format_bytes, (self.reserved_bytes, self.expandable_bytes, self.packed_bytes)
        )
        return (
            f"CUDA's allocator reserves {reserved}, {self.fragmentation:.1%} above the tensors; {expandable} with "
            f"expandable segments; static addresses would take {packed}."
        )


def reserved_by(trace: Trace, actions: Actions | None = None) -> Reserved:
    """Predict what CUDA's allocator reserves for a step that is repeated.

    Args:
        trace: The recorded step.
        actions: By value id; None for the plain step.

    Example:
        >>> reserved_by(Trace((), (), (), 0, resident_bytes=3 << 20)).reserved_bytes >> 20
        20
    """
    requests = lifetimes(trace, actions)
    usual, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    play(usual, requests)
    play(expandable, requests)
    return Reserved(
        usual.peak_allocated_bytes, usual.peak_reserved_bytes, expandable.peak_reserved_bytes, pack(requests).n_bytes
    )


def runs_within(trace: Trace, actions: Actions | None, limit_bytes: int, *, expandable: bool = False) -> bool:
    """Whether a repeated step gets all of its memory from an allocator that may reserve so much.

    Args:
        trace: The recorded step.
        actions: By value id; None for the plain step.
        limit_bytes: The most that may be reserved; the allocator gives free segments back before it fails.
        expandable: Whether segments are expandable.
    """
    try:
        play(CachingAllocator(limit_bytes, expandable=expandable), lifetimes(trace, actions))
    except NoMemoryLeft:
        return False
    return True


def expandable_segments() -> bool:
    """Whether this process asks PyTorch for expandable segments, by the variables that its documentation names."""
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def play(allocator: CachingAllocator, requests: Sequence[Lifetime]) -> None:
    """Run a step through an allocator, and once more with the free blocks that it left.

    Raises:
        NoMemoryLeft: When the allocator's limit leaves no room for a request.
    """
    # What is there before the step stays from the first step on; it is first in the list and last to be released.
    end = max((r.last for r in requests), default=0)
    staying = [r for r in requests if r.first == 0 and r.last == end]
    for request in staying:
        allocator.allocate(request.n_bytes)
    events = sorted(
        event
        for i, r in enumerate(requests)
        if not (r.first == 0 and r.last == end)
        for event in ((r.first, 0, i), (r.last, 1, i))
    )
    for _ in range(N_STEPS):
        _step(allocator, requests, events)


def _step(allocator: CachingAllocator, requests: Sequence[Lifetime], events: Sequence[tuple[int, int, int]]) -> None:
    held: dict[int, Block] = {}
    for _, is_release, index in events:
        if is_release:
            allocator.free(held.pop(index))
        else:
            held[index] = allocator.allocate(requests[index].n_bytes)
