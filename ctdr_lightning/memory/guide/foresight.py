"""Kinds of steps that are planned before they run, from kinds of the same structure, so that they never run unplanned.

A foreseen step runs under its plan at once. Its sizes are seen meanwhile, and steps that were foreseen too large or too
small are planned again. A kind that turns out to be another step than foreseen is recorded the next time, and no kind
whose batches are like its own is foreseen any more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ctdr_lightning.memory.guide.step_kinds import Kind
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.recorder.size_watch import SizeWatch
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.traces.foreseen import Sizes, foreseen
from ctdr_lightning.memory.traces.trace import LEAN, Trace

# A plan for less than this much more than the step has of bytes drops hardly anything that it need not.
NEAR = 0.97


class Foresight:
    """Foresees kinds of steps over a run.

    Attributes:
        watch: Observer of the sizes of the running foreseen step; None if there is none.
    """

    def __init__(self) -> None:
        self.watch: SizeWatch | None = None
        self._wrong: set[Hashable] = set()
        self._frame: Hashable = None
        self._seen: SizeWatch | None = None

    def fills(self, kind: Kind, signature: Hashable, kinds: Mapping[Hashable, Kind]) -> bool:
        """Whether a kind that has not run could be given a trace.

        Args:
            kind: The kind.
            signature: Its signature.
            kinds: All that are known, by theirs.
        """
        self._frame, sizes = _parted(signature)
        if kind.trace is not None or kind.held or not sizes or self._frame in self._wrong:
            return False
        parted = ((_parted(other), found) for other, found in kinds.items())
        alike = [(of, found) for (frame, of), found in parted if frame == self._frame and _ran(found)]
        if not alike or len({found.structure for _, found in alike}) > 1:
            return False
        kind.trace = foreseen([(of, found.trace) for of, found in alike if found.trace is not None], sizes)
        like = alike[-1][1]
        kind.structure, kind.fingerprint, kind.forwards = like.structure, like.fingerprint, like.forwards
        kind.foreseen = kind.trace is not None
        return kind.foreseen

    def begin(self, kind: Kind, *, guided: bool) -> None:
        """A step begins: where its kind is foreseen and it runs under its plan, its sizes are seen until `stop`."""
        self._seen = None
        if guided and kind.foreseen and kind.trace is not None:
            self.watch = SizeWatch(kind.trace)
            self.watch.__enter__()

    def stop(self) -> None:
        """The step is over, or broken off; twice is once."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
            self._seen = watch

    def ran(self, kind: Kind) -> bool:
        """A step is over. Returns whether it has to be planned anew, as its sizes are not those foreseen.

        Args:
            kind: Its kind.
        """
        if self._seen is None:
            return False
        found, before, kind.foreseen = self._seen.trace(), kind.trace, False
        if found is None or kind.plan is None or before is None:
            self._wrong.add(self._frame)
            kind.plan = None
            return False
        kind.trace, kind.plan = found, _as_seen(kind.plan, before, found)
        made, there = (sum(storage.n_bytes for storage in trace.storages) for trace in (before, found))
        fits = kind.plan.budget_bytes is not None and kind.plan.peak_bytes <= kind.plan.budget_bytes
        return _sizes(found) != _sizes(before) and not (fits and there >= NEAR * made)


def _ran(kind: Kind) -> bool:
    return kind.plan is not None and kind.trace is not None and not kind.foreseen


def _sizes(trace: Trace) -> tuple[Any, ...]:
    return trace.values, trace.storages, [op.temp_bytes for op in trace.ops]


def _as_seen(plan: Plan, foreseen: Trace, seen: Trace) -> Plan:
    """The plan's actions for the step as it ran; bytes resident with the step are part of the plan's trace alone."""
    known = plan.trace
    beside = known.storages[len(foreseen.storages) :]
    resident_bytes = known.resident_bytes - foreseen.resident_bytes + seen.resident_bytes
    trace = replace(
        known, ops=seen.ops, values=seen.values, storages=(*seen.storages, *beside), resident_bytes=resident_bytes,
        meta={key: note for key, note in known.meta.items() if key == LEAN} | seen.meta,
    )  # fmt: skip
    return replace(plan, timeline=simulate(trace, plan.timeline.actions), bound_seconds=0.0)


def _parted(signature: Hashable) -> tuple[Hashable, Sizes]:
    """A signature without the dimensions of its tensors, and these."""
    if not isinstance(signature, tuple):
        return signature, ()
    if len(signature) == 2 and isinstance(signature[1], torch.dtype) and isinstance(signature[0], tuple):
        return (len(signature[0]), signature[1]), signature[0]
    parts = [_parted(part) for part in signature]
    return tuple(frame for frame, _ in parts), tuple(size for _, sizes in parts for size in sizes)
