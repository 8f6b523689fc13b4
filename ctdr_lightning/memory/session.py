"""Steps over a whole run: the first of each kind is measured, later ones are guided by its plan.

Measured execution records the step while the online policy keeps it under the budget; guided execution carries out the
plan. A step that differs from its plan goes on under the online policy and is measured anew the next time, at most
``MAX_DIVERGENCES`` times: a net whose ops change from step to step stays with the online policy. This joins Capuchin's
two phases (ASPLOS 2020) and DTR (ICLR 2021) in one engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.torch_private import tree_flatten
from ctdr_lightning.memory.holders.base import Holder
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.recorder.recorder import Recorder
from ctdr_lightning.memory.search.transfer import structure_of
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.tape.tape import Tape
from ctdr_lightning.memory.traces.trace import Trace
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.memory.values.op_traits import COLLECTIVE

# Chosen, not tuned: a net whose steps have differed so often will differ again, and each recording takes time.
MAX_DIVERGENCES = 3
# Under a budget, steps that a plan lets run untouched are watched this often before the tape stays away: a first step
# is often lighter than the others (a warm-up, a loss thrown away), a second hardly ever. Kinds that differ in sizes
# alone are watched together until any step differs: 60 lengths, each watched twice, took five times as long as plain
# steps for three epochs.
WATCHED_STEPS = 2
# One kind of step for each sequence length: 64 lengths, or what is left of them after rounding, serve an epoch.
MOST_KINDS = 64
# An estimate, not measured: 2 kB an op in Python's memory for a trace with its plan. So many ops would be 256 MiB.
MOST_OPS = 128 * 1024
_ANOTHER_GRAPH = "its graph is another"
Planner = Callable[[Trace], Plan]


@dataclass
class _Kind:
    """What is known of the steps of one signature."""

    trace: Trace | None = None
    plan: Plan | None = None
    planner: Planner | None = None
    divergences: int = 0
    structure: Hashable = None
    fingerprint: Hashable = None


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
        holders: Where offloaded values wait, over all steps.

    Attributes:
        budget_bytes: The budget that steps without a plan are kept under; may be changed between steps.
        static_bytes: What is in memory all along; may be changed between steps.
        events: What happened, in order, in words: plans made, divergences.
        reached_bytes: What the last aborted step is known to have taken, ``static_bytes`` included; 0 where nothing is
            known.
        guided: Whether the last step ran under a plan, rather than being recorded.
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
        holders: Mapping[str, Holder] | None = None,
    ) -> None:
        self.events: list[str] = []
        self.measured_peak_bytes = 0
        self.reached_bytes = 0
        self.exchanged = self.guided = False
        self._planner = planner
        self.budget_bytes = budget_bytes
        self.static_bytes = static_bytes
        self._beside_bytes = 0
        self._holders = holders
        self._root = ref(root) if root is not None else None  # a session outlives the run, the model need not
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._watched: Counter[Hashable] = Counter()
        self._reserve_bytes = 0
        self._fingerprint: tuple[Hashable, ...] = ()
        self._under_way = self._in_forward = False
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

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all kinds of steps that are remembered."""
        return tuple(kind.plan for kind in self._kinds.values() if kind.plan is not None)

    def plan_of(self, signature: Hashable) -> Plan | None:
        """The plan of one kind of step; None before it was made.

        Args:
            signature: As for `begin`.
        """
        kind = self._kinds.get(signature)
        return kind.plan if kind is not None else None

    def begin(self, signature: Hashable, *, meter: bool = False, beside_bytes: int = 0) -> None:
        """Before the forward: install the recorder or the tape.

        Args:
            signature: What kind of step this is.
            meter: Also measure the true peak of this step, where the device's allocator keeps no count.
            beside_bytes: What is in memory in this step besides ``static_bytes``: its batch, older gradients.
        """
        self.abort()
        kind = self._current = self._kind_of(signature)
        self._beside_bytes, self._fingerprint, self._under_way, self._in_forward = beside_bytes, (), True, True
        self._signature = signature
        if meter:
            self._meter = PeakMeter()
            self._meter.__enter__()
        if kind.trace is not None and kind.plan is not None and kind.planner is not self._planner:
            self._make_plan(kind)
        self.guided = not (kind.plan is None or self._watches(kind))
        if not self.guided:
            root = self._root() if self._root is not None else None
            standing = (*root.parameters(), *root.buffers()) if root is not None else ()
            self._recorder = Recorder(evictor=self._evictor(), root=root, standing=standing)
            self._recorder.__enter__()
        elif kind.plan is not None and not kind.plan.keeps_all:
            self._tape = Tape(kind.plan, self._evictor(), self._holders)
            self._tape.__enter__()

    def _kind_of(self, signature: Hashable) -> _Kind:
        kind = self._kinds.setdefault(signature, _Kind())
        self._kinds.move_to_end(signature)
        while len(self._kinds) > MOST_KINDS or (len(self._kinds) > 1 and self._n_ops() > MOST_OPS):
            self._kinds.popitem(last=False)
        return kind

    def _n_ops(self) -> int:
        return sum(len(kind.trace.ops) for kind in self._kinds.values() if kind.trace is not None)

    def _watches(self, kind: _Kind) -> bool:
        """Whether a step that its plan lets run untouched is recorded, and kept under the budget, all the same.

        So are the first ones, and all once any differed.
        """
        untouched = self.budget_bytes is not None and kind.plan is not None and kind.plan.keeps_all
        return untouched and (self._watched[kind.structure] < WATCHED_STEPS or kind.divergences > 0)

    def backward_begins(self, loss: Tensor) -> None:
        """Before the backward of a loss; may be called several times in a step.

        A step that is let run untouched is known by its graphs: where they are others, the next one is recorded anew.
        """
        kind = self._current
        if self.budget_bytes is not None and kind is not None:
            untouched = kind.plan is None or kind.plan.keeps_all
            self._fingerprint += (graph_of(loss),) if untouched else ()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What runs inside is none of the step: an optimizer's update."""
        recorder = self._recorder
        if recorder is None:
            yield
            return
        recorder.resting = True
        try:
            yield
        finally:
            recorder.resting = False

    def forward_done(self) -> None:
        """After the forward: a tape leaves, its handles go on working; a recorder stays for the backward."""
        self._in_forward = False
        if self._tape is not None:
            self._tape.__exit__(None, None, None)
            self._note_divergence(self._tape.diverged)
            self._tape = None

    def end(self) -> None:
        """After the backward: a recorder leaves, and the plan for the steps to come is made. Twice is once."""
        self.forward_done()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
            if recorder.evictor is not None:
                self._reserve_bytes = max(self._reserve_bytes, recorder.evictor.reserve_bytes)
        self._stop_meter()
        under_way, self._under_way = self._under_way, False
        kind, found = self._current, self._fingerprint
        if kind is None or not under_way:
            return
        differs = found != kind.fingerprint
        if recorder is not None and (kind.plan is None or differs):
            kind.trace, kind.fingerprint = recorder.trace(), found
            kind.structure = structure_of(kind.trace) if self.budget_bytes is not None else None
            self.events += [f"{what} {why}" for what, why in kind.trace.meta.items() if what != "torch"]
            if kind.plan is not None:
                self._note_divergence(_ANOTHER_GRAPH)
            self._make_plan(kind)
        elif kind.plan is not None and kind.plan.keeps_all and self.budget_bytes is not None:
            self._watched[kind.structure] += 1
            if differs:
                self._note_divergence(_ANOTHER_GRAPH)

    def _make_plan(self, kind: _Kind) -> None:
        assert kind.trace is not None
        kind.plan, kind.planner = self._planner(kind.trace), self._planner
        shapes = shapes_in(self._signature)
        batch = f" For batches of {' and '.join(shapes)}." if shapes else ""
        self.events.append(kind.plan.explain().splitlines()[0] + batch)

    def abort(self) -> None:
        """Leave everything that is installed; for any exception, and harmless otherwise."""
        if self._under_way:  # it is called again before the next step, when what is installed tells nothing any more
            self.exchanged = self._exchanges()
            self.reached_bytes = self._reached() or self.reached_bytes
        for installed in (self._tape, self._recorder):
            if installed is not None:
                installed.__exit__(RuntimeError, None, None)
        self._tape = self._recorder = None
        self._under_way = False
        self._stop_meter()

    def _reached(self) -> int:
        if self._recorder is not None and self._recorder.evictor is not None:
            return self.static_bytes + self._beside_bytes + self._recorder.evictor.live.peak
        if self.plan is None:
            return 0
        return self.plan.forward_peak_bytes if self._in_forward else self.plan.peak_bytes

    def _exchanges(self) -> bool:
        if self._recorder is not None:
            return self._recorder.exchanged
        if self.trace is None or (self._tape is not None and self._tape.diverged):
            return True
        return any(op.pin == COLLECTIVE and not op.backward for op in self.trace.ops)

    def replan(self, planner: Planner) -> None:
        """Make the plans with another planner: the present kind's now, each other's when a step of it comes.

        Args:
            planner: Told from the one before by identity.
        """
        self._planner = planner
        if self._current is not None and self._current.trace is not None:
            self._make_plan(self._current)

    def record_anew(self, why: str) -> None:
        """The last step was not what its plan says: the next of its kind is recorded.

        Args:
            why: In words, for the events.
        """
        self._note_divergence(why)

    def _stop_meter(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self.measured_peak_bytes = self._meter.live.peak
            self._meter = None

    def _evictor(self) -> Evictor | None:
        if self.budget_bytes is None:
            return None
        room = max(self.budget_bytes - self.static_bytes - self._beside_bytes, 0)
        # An op's size is known when it has run. A step of a new kind has ops like those of others, but where one kind
        # had an op that fills half of the room, to keep as much free would evict all of a smaller one.
        return Evictor(room, reserve_bytes=min(self._reserve_bytes, room // 2))

    def _note_divergence(self, where: str) -> None:
        kind = self._current
        if not where or kind is None:
            return
        kind.divergences += 1
        self._watched.clear()
        self.events.append(f"A step differed from its plan: {where}.")
        if kind.divergences <= MAX_DIVERGENCES and self.guided:
            kind.plan = None


def graph_of(loss: Tensor) -> Hashable:
    """What tells one autograd graph from another: how many functions of which names, and their edges, in order."""
    todo, seen, names = [loss.grad_fn], set(), []
    while todo:
        function = todo.pop()
        if function is not None and function not in seen:
            seen.add(function)
            names.append(function.name())
            todo += [after for after, _ in function.next_functions]
    return len(names), hash(tuple(names))
