"""Bytes that CUDA's allocator reserves for a step: the question of DNNMem and xMem, answered for a plan.

Gao et al., "Estimating GPU Memory Consumption of Deep Learning Models" (DNNMem), ESEC/FSE 2020; Shi et al., "xMem",
2025.

Reproduced: the step's requests and releases in order are played through a model of the framework's own allocator, so
    that rounding, segments and fragmentation count, and not tensors alone.
Modelled: the CUDA context, which takes some hundred MiB more, is not part of it, nor are libraries' workspaces that
    the trace does not hold.
Left out: other frameworks, and other processes on the device.

Complexity: O(n log n) in the requests; 0.3 s for a step of 3,158 ops where tried, most of it for the packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctdr_lightning.basics.allocator_settings import allocator_settings, expandable_segments
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.allocator.blocks import Lifetime, lifetimes
from ctdr_lightning.memory.allocator.caching_allocator import Block, CachingAllocator, NoMemoryLeft
from ctdr_lightning.memory.allocator.packing import pack
from ctdr_lightning.memory.simulator.actions import Actions
from ctdr_lightning.memory.traces.trace import Trace

# A step finds the free blocks of the one before it. Of six torchvision nets none reserved more after its first step;
# under a limit the second may still give segments back that only the first had asked for.
N_STEPS = 2
N_STEPS_WITHIN = 3
# Of a card, what pages hold that are partly in use, by tensors that are not where the model has them. ResNet-50 on an
# H200 with 7.5 GiB ran out of memory with 0.11 GiB in such pages, under a plan for all but 0.08.
PARTLY_USED_SHARE = 0.02
_NOT_MODELLED = (
    "garbage_collection_threshold", "large_segment_size_mb", "max_split_size_mb", "per_process_memory_fraction",
    "roundup_power2_divisions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reserved:
    """A step in the allocator.

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
    def budget_bytes(self) -> int:
        """The least budget that serves the step, with the allocator's settings here."""
        return _beside_partly_used(self.expandable_bytes) if expandable_segments() else self.reserved_bytes

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
            f"expandable segments; static addresses would take {packed}.{_caveat()}"
        )


def reserved_by(trace: Trace, actions: Actions | None = None) -> Reserved:
    """Predict the bytes that CUDA's allocator reserves for a step that is repeated.

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


def _beside_partly_used(pages_bytes: int) -> int:
    """The budget of which so many bytes are left beside pages that are partly in use."""
    return -int(-pages_bytes // (1 - PARTLY_USED_SHARE))


def runs_within(trace: Trace, actions: Actions | None, limit_bytes: int, *, expandable: bool = False) -> bool:
    """Whether a repeated step gets all of its memory from an allocator with this limit on reserved bytes.

    Args:
        trace: The recorded step.
        actions: By value id; None for the plain step.
        limit_bytes: The most that may be reserved.
        expandable: Whether segments are expandable.
    """
    return flushes_within(trace, actions, limit_bytes, expandable=expandable) == 0


def is_served(trace: Trace, actions: Actions | None, limit_bytes: int) -> bool:
    """Whether the step's device serves it within a limit: CUDA's allocator by its settings here, any other one always.

    Args:
        trace: The recorded step, whose tensors fit.
        actions: By value id; None for the plain step.
        limit_bytes: The most that may be reserved.
    """
    return trace.device != "cuda" or runs_within(trace, actions, limit_bytes, expandable=expandable_segments())


def flushes_within(trace: Trace, actions: Actions | None, limit_bytes: int, *, expandable: bool = False) -> int | None:
    """Number of times in each step that an allocator with this limit on reserved bytes gives free segments back.

    Each time the device is waited for, and memory is unmapped and mapped again: 20 to 200 ms of a step.

    Args:
        trace: The recorded step.
        actions: By value id; None for the plain step.
        limit_bytes: The most that may be reserved.
        expandable: Whether segments are expandable.

    Returns:
        Times in a step to which others like it went before; None where there is no room for a step at all.
    """
    within = int((1 - PARTLY_USED_SHARE) * limit_bytes) if expandable else limit_bytes
    try:
        return play(CachingAllocator(within, expandable=expandable), lifetimes(trace, actions), N_STEPS_WITHIN)
    except NoMemoryLeft:
        return None


def served_in_words(trace: Trace, actions: Actions | None, limit_bytes: int) -> str:
    """The trouble that a card of so many bytes has with a repeated step; empty where its allocator serves it steadily.

    Args:
        trace: The recorded step.
        actions: By value id; None for the plain step.
        limit_bytes: The most that may be reserved.
    """
    expandable = expandable_segments()
    flushes = flushes_within(trace, actions, limit_bytes, expandable=expandable)
    if flushes == 0:
        return ""
    size = format_bytes(limit_bytes)
    said = f"A card of {size} cannot serve the step, because free memory is fragmented."
    if flushes:
        said = f"On a card of {size} the allocator gives segments back {flushes} times a step, 20 to 200 ms each."
    return said if expandable else f"{said} Let PYTORCH_CUDA_ALLOC_CONF allow expandable segments."


def not_modelled() -> list[str]:
    """The settings of PyTorch's allocator that this process asks for and that the model of it leaves out."""
    found = allocator_settings()
    return [name for name in _NOT_MODELLED if name in found] + (
        ["backend"] if found.get("backend", "native") != "native" else []
    )


def _caveat() -> str:
    names = not_modelled()
    return f" The allocator's setting {' and '.join(names)} is not modelled." if names else ""


def play(allocator: CachingAllocator, requests: Sequence[Lifetime], n_steps: int = N_STEPS) -> int:
    """Run a step through an allocator, and again with the free blocks that it left.

    Returns:
        How often the last step had free segments given back.

    Raises:
        NoMemoryLeft: When the allocator's limit leaves no room for a request.
    """
    # Tensors from before the step stay from the first step on: first in the list, last to be released.
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
    before = 0
    for _ in range(n_steps):
        before = allocator.n_flushes
        _step(allocator, requests, events)
    return allocator.n_flushes - before


def _step(allocator: CachingAllocator, requests: Sequence[Lifetime], events: Sequence[tuple[int, int, int]]) -> None:
    held: dict[int, Block] = {}
    for _, is_release, index in events:
        if is_release:
            allocator.free(held.pop(index))
        else:
            held[index] = allocator.allocate(requests[index].n_bytes)
