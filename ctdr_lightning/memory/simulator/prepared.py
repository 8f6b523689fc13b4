"""Reusable facts of a trace, made once and kept by the planner: its index, its plain bytes, bounds, chains.

Every search, bound and policy needs the same facts of a trace. They are made when first asked for and live in this
object, which the caller keeps for as long as it plans the same step; nothing is remembered behind its back.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ctdr_lightning.basics.made_once import MadeOnce
from ctdr_lightning.memory.simulator.timeline import plain_bytes
from ctdr_lightning.memory.simulator.trace_index import TraceIndex
from ctdr_lightning.memory.traces.trace import Trace


class Prepared(MadeOnce):
    """A trace with its reusable facts.

    Args:
        trace: The recorded step, which is never changed.

    Example:
        >>> import torch
        >>> from ctdr_lightning.memory import Prepared, plan, record
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
        >>> step = Prepared(record(lambda: net(x).sum()))
        >>> [plan(step, limit).peak_bytes <= limit for limit in (10_000, 20_000)]
        [True, True]
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def index(self) -> TraceIndex:
        """The trace as plain lists."""
        return TraceIndex(self.trace)

    @cached_property
    def plain_ends(self) -> tuple[int, ...]:
        """For each storage the last tick at which it is live where nothing is dropped."""
        ends = [s.end for s in self.trace.storages]
        for value in self.trace.saved:
            place = self.trace.values[value].storage
            ends[place] = max(ends[place], self.index.released[value])
        return tuple(ends)

    @cached_property
    def plain_bytes_at(self) -> np.ndarray:
        """Live bytes at each tick where nothing is dropped; read-only, shape ``(n_ticks,)``."""
        live = plain_bytes(self.trace, self.plain_ends)
        live.flags.writeable = False
        return live

    @property
    def plain_peak_bytes(self) -> int:
        """Peak of the step where nothing is dropped."""
        return int(self.plain_bytes_at.max(initial=self.trace.resident_bytes))


def prepared(step: Trace | Prepared) -> Prepared:
    """Prepare a step; a prepared one is returned unchanged."""
    return step if isinstance(step, Prepared) else Prepared(step)
