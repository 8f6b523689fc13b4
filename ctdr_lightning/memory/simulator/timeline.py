"""Cost of a step over its time: bytes, seconds, and the tensors at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ctdr_lightning.memory.simulator.actions import Action
from ctdr_lightning.memory.simulator.transfers import Transfers
from ctdr_lightning.memory.traces.trace import Trace

Segments = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Timeline:
    """Bytes and seconds of one step.

    Attributes:
        trace: The step.
        actions: The actions for its values.
        bytes_at: Live bytes at each tick, replays' own peaks included, weights included; shape ``(n_ticks,)``.
        seconds: Time of all ops, replays and codecs, and of waiting for transfers.
        recompute_seconds: Time of the replays and codecs alone.
        replays: Number of replays.
        ends: Last tick at which each storage is live as first made; outputs that replays leave behind are in
            ``returns``.
        returns: ``(first tick, last tick, bytes)`` of outputs that replays left behind.
        transfers: Times at which offloaded values move, and the step's waits for them.
    """

    trace: Trace
    actions: Mapping[int, Action]
    bytes_at: np.ndarray
    seconds: float
    recompute_seconds: float
    replays: int
    ends: np.ndarray
    returns: tuple[tuple[int, int, int], ...]
    transfers: Transfers = field(default_factory=Transfers)

    @cached_property
    def peak_bytes(self) -> int:
        """The largest number of live bytes."""
        return int(self.bytes_at.max(initial=self.trace.resident_bytes))

    @property
    def forward_peak_bytes(self) -> int:
        """The largest number of live bytes up to the forward's last op."""
        return int(self.bytes_at[: self.trace.forward_ticks].max(initial=self.trace.resident_bytes))

    @cached_property
    def peak_tick(self) -> int:
        """When the peak is reached first."""
        return int(self.bytes_at.argmax()) if len(self.bytes_at) else 0

    def alive_at_peak(self) -> list[tuple[str, str, int]]:
        """``(module path, op, bytes)`` of every tensor from the step that is live at the peak, the largest first."""
        found = []
        makers = {v.storage: i for i, v in reversed(list(enumerate(self.trace.values))) if v.op >= 0}
        for index, storage in enumerate(self.trace.storages):
            if 0 <= storage.born <= self.peak_tick <= self.ends[index] and index in makers:
                value = makers[index]
                found.append(
                    (self.trace.module_of(value), self.trace.ops[self.trace.values[value].op].name, storage.n_bytes)
                )
        return sorted(found, key=lambda row: -row[2])

    def plot(self, ax: Any = None, *, label: str = "plan") -> Any:
        """Draw bytes over the step's time.

        Args:
            ax: Axes to draw on; new ones are made where none are given.
            label: Name of the curve.

        Returns:
            The matplotlib axes.
        """
        from matplotlib import pyplot as plt

        ax = ax or plt.subplots(figsize=(8, 3), layout="constrained")[1]
        ax.step(np.arange(len(self.bytes_at)), self.bytes_at / 2**20, where="post", label=label)
        ax.set(xlabel="tick of the step", ylabel="live memory (MiB)", ylim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False)
        return ax


def segments_of(steps: dict[int, int]) -> Segments:
    """Steps up and down, by tick, as stretches of one level."""
    ticks = sorted([tick for tick, n_bytes in steps.items() if n_bytes])
    found, level = [], 0
    for first, end in pairwise(ticks):
        level += steps[first]
        if level:
            found.append((first, end, level))
    return found


def plain_bytes(trace: Trace, ends: Sequence[int]) -> np.ndarray:
    """Live bytes at each tick where nothing is dropped; shape ``(n_ticks,)``.

    Args:
        trace: The recorded step.
        ends: Last tick at which each storage is live.
    """
    n = trace.n_ticks
    delta = np.zeros(n + 2, dtype=np.int64)
    for storage, end in zip(trace.storages, ends, strict=True):
        if storage.born >= 0:
            delta[storage.born] += storage.n_bytes
            delta[min(end, n) + 1] -= storage.n_bytes
    live: np.ndarray = np.cumsum(delta[:n]) + trace.resident_bytes
    for op in trace.ops:
        live[op.tick] += op.temp_bytes
    return live
