"""Steps over a whole run: the first of each kind is measured, later ones are guided by its plan.

Measured execution records the step while the online policy keeps it under the budget; guided execution carries out the
plan. A step that differs from its plan goes on under the online policy and is measured anew the next time, at most
``PATIENCE`` times: a net whose ops change from step to step stays with the online policy. This joins Capuchin's two
phases (ASPLOS 2020) and DTR (ICLR 2021) in one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.torch_private import tree_flatten
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.recorder.recorder import Recorder
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.tape.tape import Tape
from ctdr_lightning.memory.traces.trace import Trace
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.memory.values.op_traits import COLLECTIVE

PATIENCE = 3
Planner = Callable[[Trace], Plan]


@dataclass
class _Kind:
    """What is known of the steps of one signature."""

    trace: Trace | None = None
    plan: Plan | None = None
    divergences: int = 0


def signature_of(batch: Any, module: nn.Module | None = None) -> Hashable:
    """What makes two steps alike: the batch's structure, shapes and dtypes, which modules train, what needs gradients.

    Args:
        batch: Any nest of tensors and plain objects.
        module: The module whose mode counts, or None.
    """
    leaves, spec = tree_flatten(batch)
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
    modes: list[bool] = []
    if module is not None:
        modes = [*(m.training for m in module.modules()), *(p.requires_grad for p in module.parameters())]
    return (str(spec), shapes, hash(tuple(modes)), torch.is_grad_enabled())


def shapes_in(signature: Hashable) -> list[str]:
    """The tensors that a signature tells of, in words: ``["64x3x32x32 float32", "64 int64"]``."""
    if not isinstance(signature, tuple):
        return []
    if len(signature) == 2 and isinstance(signature[1], torch.dtype) and isinstance(signature[0], tuple):
        shape = "x".join(map(str, signature[0])) or "one"
        return [f"{shape} {str(signature[1]).removeprefix('torch.')}"]
    return [text for part in signature for text in shapes_in(part)]


class Session:
    """Runs steps under plans that it has made itself.

    Args:
        planner: From a trace to a plan; called once for each kind of step.
        budget_bytes: Largest true peak of a step; without one the first steps are recorded, but not kept under
            anything.
        static_bytes: What is in memory all along and not made by the step: weights, optimizer state, the batch.
        root: The module that module paths in traces and plans start from; None lets each step find its own.

    Attributes:
        budget_bytes: The budget that steps without a plan are kept under; may be changed between steps.
        events: What happened, in order, in words: plans made, divergences.
        reached_bytes: What the last aborted step is known to have taken, ``static_bytes`` included; 0 where nothing is
            known.
        exchanged: Whether the last aborted step's forward exchanged data with other processes, or may have done so
            where nothing is known of it.
        measured_peak_bytes: True peak of the last step that was metered, without ``static_bytes``; 0 before the first.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        budget_bytes: int | None = None,
        static_bytes: int = 0,
        root: nn.Module | None = None,
    ) -> None:
        self.events: list[str] = []
        self.measured_peak_bytes = 0
        self.reached_bytes = 0
        self.exchanged = False
        self._planner = planner
        self.budget_bytes = budget_bytes
        self._static_bytes = static_bytes
        self._root = ref(root) if root is not None else None  # a session outlives the run, the model need not
        self._kinds: dict[Hashable, _Kind] = {}
        self._current: _Kind | None = None
        self._signature: Hashable = None
        self._recorder: Recorder | None = None
        self._tape: Tape | None = None
        self._meter: PeakMeter | None = None

    @property
    def trace(self) -> Trace | None:
        """The trace of the present kind of step."""
        return self._current.trace if self._current is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan of the present kind of step."""
        return self._current.plan if self._current is not None else None

    def begin(self, signature: Hashable, *, meter: bool = False) -> None:
        """Before the forward: install the recorder or the tape.

        Args:
            signature: What kind of step this is.
            meter: Also measure the true peak of this step, where the device's allocator keeps no count.
        """
        self.abort()
        self._signature = signature
        kind = self._current = self._kinds.setdefault(signature, _Kind())
        if meter:
            self._meter = PeakMeter()
            self._meter.__enter__()
        if kind.plan is None:
            root = self._root() if self._root is not None else None
            self._recorder = Recorder(evictor=self._evictor(), root=root)
            self._recorder.__enter__()
        elif not kind.plan.keeps_all:
            self._tape = Tape(kind.plan, self._evictor())
            self._tape.__enter__()

    def forward_done(self) -> None:
        """After the forward: a tape leaves, its handles go on working; a recorder stays for the backward."""
        if self._tape is not None:
            self._tape.__exit__(None, None, None)
            self._note_divergence(self._tape)
            self._tape = None

    def end(self) -> None:
        """After the backward: a recorder leaves, and the plan for the steps to come is made."""
        self.forward_done()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
        self._stop_meter()
        if recorder is not None and self._current is not None:
            self._current.trace = recorder.trace()
            self.events += [f"{what} {why}" for what, why in self._current.trace.meta.items() if what != "torch"]
            self._current.plan = self._planner(self._current.trace)
            shapes = shapes_in(self._signature)
            batch = f" For batches of {' and '.join(shapes)}." if shapes else ""
            self.events.append(self._current.plan.explain().splitlines()[0] + batch)

    def abort(self) -> None:
        """Leave everything that is installed; for any exception, and harmless otherwise."""
        if self._current is not None:
            self.exchanged = self._exchanges()
        if self._recorder is not None and self._recorder.evictor is not None:
            self.reached_bytes = self._static_bytes + self._recorder.evictor.live.peak
        elif self.plan is not None:
            self.reached_bytes = self.plan.peak_bytes
        for installed in (self._tape, self._recorder):
            if installed is not None:
                installed.__exit__(RuntimeError, None, None)
        self._tape = self._recorder = None
        self._stop_meter()

    def _exchanges(self) -> bool:
        if self._recorder is not None:
            return self._recorder.exchanged
        if self.trace is None or (self._tape is not None and self._tape.diverged):
            return True
        return any(op.pin == COLLECTIVE and not op.backward for op in self.trace.ops)

    def replan(self, planner: Planner) -> None:
        """Make the plans again, from the traces there are, with another planner."""
        self._planner = planner
        for kind in self._kinds.values():
            if kind.trace is not None:
                kind.plan = planner(kind.trace)

    def _stop_meter(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self.measured_peak_bytes = self._meter.live.peak
            self._meter = None

    def _evictor(self) -> Evictor | None:
        if self.budget_bytes is None:
            return None
        return Evictor(max(self.budget_bytes - self._static_bytes, 0))

    def _note_divergence(self, tape: Tape) -> None:
        kind = self._current
        if not tape.diverged or kind is None:
            return
        kind.divergences += 1
        self.events.append(f"A step differed from its plan: {tape.diverged}.")
        if kind.divergences <= PATIENCE:
            kind.plan = None
