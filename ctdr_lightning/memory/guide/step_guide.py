"""Steps over a whole run: the first of each kind is measured, later ones are guided by its plan.

Measured execution records the step while the online policy keeps it under the budget; guided execution carries out the
plan. A step that differs from its plan goes on under the online policy and is measured anew the next time, at most
``MAX_DIVERGENCES`` times: a net whose ops change from step to step stays with the online policy. This joins Capuchin's
two phases (ASPLOS 2020) and DTR (ICLR 2021) in one engine.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ctdr_lightning.basics.errors import ReplayError
from ctdr_lightning.basics.torch_private import current_dispatch_mode, hooks_of, top_saved_tensors_hooks
from ctdr_lightning.memory.guide.events import Differed, Event, OverBudget, PlanMade, Recorded, Refuted
from ctdr_lightning.memory.guide.foresight import Foresight
from ctdr_lightning.memory.guide.step_kinds import Kind, Kinds, Planner, graph_of, shapes_in
from ctdr_lightning.memory.holders.base import Holder, Holders
from ctdr_lightning.memory.plans.plan import Plan, most_away_bytes
from ctdr_lightning.memory.recorder.recorder import Recorder
from ctdr_lightning.memory.search.transfer import structure_of
from ctdr_lightning.memory.tape.backward_watch import BackwardWatch
from ctdr_lightning.memory.tape.forward_watch import ForwardWatch, reached_before
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.tape.tape import Tape
from ctdr_lightning.memory.tape.verifier import check_verify
from ctdr_lightning.memory.traces.trace import WRITTEN_UNSEEN, Trace
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.memory.values.op_traits import COLLECTIVE

Tensors = Iterable[Tensor]
# Chosen, not tuned: a net whose steps have differed so often will differ again, and each recording takes time.
MAX_DIVERGENCES = 3
# Under a budget, steps that a plan lets run untouched are watched this often before the tape stays away: a first step
# is often lighter than the others (a warm-up, a loss thrown away), a second hardly ever. Kinds that differ in sizes
# alone are watched together until any step differs: 60 lengths, each watched twice, took five times as long as plain
# steps for three epochs.
WATCHED_STEPS = 2
_ANOTHER_GRAPH = "its graph is another"


class StepGuide:
    """Records the first step of each kind, and carries out the plans that it is given for later ones.

    Args:
        budget_bytes: Largest true peak of a step; without one the first steps are recorded, but not kept under
            anything.
        static_bytes: What is in memory all along and not made by the step: weights, optimizer state, the batch.
        root: The module that module paths in traces and plans start from; None lets each step find its own.
        holders: Where offloaded values wait, over all steps.
        verify: Which guided steps compare every value that comes back with what it was: the ``"first"`` of each kind
            under each setting of precision, algorithms and hooks and one in 500 after it, ``"always"`` or ``"never"``.
        verify_at_once: Whether each value is verified as it comes back: where gradients are used in the backward.
        zeros: Whether recorded steps count zeros, as for `record`.

    Attributes:
        budget_bytes: The budget that steps without a plan are kept under; may be changed between steps.
        static_bytes: Bytes that are resident throughout; may be changed between steps.
        absent_bytes: Those of ``static_bytes`` that are not in memory yet: the optimizer's state before its first step.
        events: Plans made and divergences, in order.
        reached_bytes: Known bytes of the last aborted step, ``static_bytes`` included; 0 if nothing is known.
        guided: Whether the last step ran under a plan, rather than being recorded.
        exchanged: Whether the last aborted step's forward exchanged data with other processes, or may have done so
            where nothing is known of it.
        writes_unseen: Whether a kernel that torch does not see writes to what was there before the step, as far as the
            last step that was aborted has shown.
        measured_peak_bytes: True peak of the last step that was metered, without ``static_bytes``; 0 before the first.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        static_bytes: int = 0,
        root: nn.Module | None = None,
        holders: Mapping[str, Holder] | None = None,
        verify: str = "first",
        verify_at_once: bool = False,
        zeros: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self._verify, self._verify_at_once, self._zeros = check_verify(verify), verify_at_once, zeros
        self.measured_peak_bytes = self.reached_bytes = 0
        self.exchanged = self.guided = self.writes_unseen = False
        self.budget_bytes, self.static_bytes = budget_bytes, static_bytes
        self._beside_bytes = self.absent_bytes = self._reserve_bytes = 0
        self._holders = holders
        self._root = ref(root) if root is not None else None  # a session outlives the run, the model need not
        self._kinds = Kinds()
        self._watched: Counter[Hashable] = Counter()
        # of the root's modules: one that was added may read what was read by nobody before
        self._hooks: list[Sized] = []
        self._fingerprint: tuple[Hashable, ...] = ()
        self._under_way = self._in_forward = self._is_part = False
        self._current: Kind | None = None
        self._signature: Hashable = None
        self._foresight = Foresight()
        self._recorder: Recorder | None = None
        self._tape: Tape | None = None
        self._watch: ForwardWatch | None = None
        self._backward: BackwardWatch | None = None
        self._below: tuple[Any, Any] = (None, None)
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
        """The plan of one kind of step, with its signature as for `begin`; None before it was made."""
        return self._kinds.get(signature, Kind()).plan

    def begin(self, signature: Hashable, *, meter: bool = False, beside_bytes: int = 0, passing: Tensors = ()) -> None:
        """Before the forward: install the recorder or the tape.

        Args:
            signature: What kind of step this is.
            meter: Also measure the true peak of this step, where the device's allocator keeps no count.
            beside_bytes: Bytes in memory in this step beside ``static_bytes``: its batch, older gradients.
            passing: Of what ``beside_bytes`` counts, the tensors that the step may free: older gradients.
        """
        self.abort()
        kind = self._current = self._kind_of(signature)
        self._beside_bytes, self._fingerprint, self._under_way, self._in_forward = beside_bytes, (), True, True
        self._signature, self._is_part = signature, False
        if meter:
            self._meter = PeakMeter()
            self._meter.__enter__()
        self.guided = not (kind.plan is None or self._watches(kind))
        self._foresight.begin(kind, guided=self.guided)
        if self.budget_bytes is not None:
            self._below = (current_dispatch_mode(), top_saved_tensors_hooks(True))
            self._watch = ForwardWatch(kind.forwards if self.guided else None, self._goes_beyond)
            self._watch.__enter__()
        if not self.guided:
            self._record(self._evictor(passing=passing))
        elif kind.plan is not None and not kind.plan.keeps_all:
            self._tape = Tape(
                kind.plan, self._evictor(), self._holders,
                verify=self._verify, settings=sum(map(len, self._hooks)), at_once=self._verify_at_once,
            )  # fmt: skip
            self._tape.__enter__()

    def refute(self, error: ReplayError) -> None:
        """The last step ended in an error of verification: pin what came back wrong, and plan its kind anew.

        Args:
            error: The error.
        """
        self.abort()
        kind = self._current
        if kind is None:
            return
        if not self._is_part:  # where recording began within the step, its ticks are others
            kind.hold(error)
        if kind.trace is not None and (error.pins or error.read_by_others):
            kind.trace = kind.trace.with_pins(kind.pins_of(error))
            for value in error.read_by_others:
                kind.trace = kind.trace.with_reader(value)
            kind.due = True
        else:
            kind.plan = None
        self.events.append(Refuted(error.problem))
        warnings.warn(f"CTDR: {error.problem} It is held from now on.", stacklevel=2)

    def _record(self, evictor: Evictor | None) -> None:
        root = self._root() if self._root is not None else None
        standing = (*root.parameters(), *root.buffers()) if root is not None else ()
        held = self._current.held if self._current is not None and not self._is_part else ()
        self._recorder = Recorder(
            evictor=evictor, root=root, standing=standing, held=held, verify=self._verify, zeros=self._zeros
        )
        self._recorder.__enter__()

    def _goes_beyond(self, number: int) -> None:
        """A guided step saves more than the recorded one: from here on it is kept under the budget, without a plan.

        Args:
            number: Of the forward of a module that does.
        """
        kind, tape = self._current, self._tape
        assert kind is not None
        assert kind.plan is not None
        plan, more = kind.plan, number > len(kind.forwards)
        self.record_anew(
            f"forward {number} of a module runs {'' if more else 'with gradients '}and did not when it was recorded"
        )
        mode, hooks = current_dispatch_mode(), top_saved_tensors_hooks(True)
        listens = tape is not None and tape.listens
        if mode not in (self._below[0], tape) or not (listens or hooks == self._below[1]):
            return  # something of the step's own lies above and must leave first
        if tape is not None:
            tape.__exit__(None, None, None)
            self._tape = None
        self._is_part, self.guided = True, False
        self._record(self._evictor(reached_before(plan, number)))

    def _kind_of(self, signature: Hashable) -> Kind:
        kind, forgotten = self._kinds.latest(signature)
        if forgotten and isinstance(self._holders, Holders):
            self._holders.trim(most_away_bytes(self.plans))
        return kind

    def _watches(self, kind: Kind) -> bool:
        """Whether a step that its plan lets run untouched is recorded, and kept under the budget, all the same.

        So are the first ones, and all once any differed.
        """
        untouched = self.budget_bytes is not None and kind.plan is not None and kind.plan.keeps_all
        return untouched and (self._watched[kind.structure] < WATCHED_STEPS or kind.divergences > 0)

    def backward_begins(self, loss: Tensor) -> None:
        """Before the backward of a loss; may be called several times in a step.

        A step is known by its graphs: where they are others, the next one is recorded anew.
        """
        if self.budget_bytes is not None and self._current is not None:
            self._fingerprint += (graph_of(loss),)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Pause recording, for an optimizer's update inside the backward."""
        watching = [mode for mode in (self._recorder, self._foresight.watch) if mode is not None]
        for mode in watching:
            mode.resting = True
        try:
            yield
        finally:
            for mode in watching:
                mode.resting = False

    def forward_done(self) -> None:
        """After the forward: a tape leaves, its handles go on working; a recorder stays for the backward."""
        self._in_forward = False
        if self._tape is not None:
            self._tape.__exit__(None, None, None)
            self.record_anew(self._tape.diverged)
            if self._current is not None and not self._tape.diverged:
                self._current.recount(self._tape.zeros.moved())
            self._backward, self._tape = self._tape.backward_watch(), None
            if self._backward is not None:
                self._backward.__enter__()
        if self._watch is not None:
            self._watch.done = True
        if self._recorder is None and self._backward is None:
            self._stop_watch()

    def _stop_watch(self) -> None:
        watches = (self._backward, self._watch)
        self._backward = self._watch = None
        for watch in watches:
            if watch is not None:
                watch.__exit__(None, None, None)

    def end(self) -> None:
        """After the backward: a recorder leaves, and the step's plan is due. Twice is once."""
        self.forward_done()
        recorder, self._recorder = self._recorder, None
        evictor = self._backward.evictor if self._backward is not None else None
        if recorder is not None:
            recorder.__exit__(None, None, None)
            evictor = recorder.evictor
        if evictor is not None:
            self._reserve_bytes = max(self._reserve_bytes, evictor.reserve_bytes)
            over_bytes = evictor.excess_bytes - self.absent_bytes
            self.events += [OverBudget(over_bytes)] * (over_bytes > 0)
        forwards = tuple(self._watch.seen) if self._watch is not None else ()
        self._stop_watch()
        self._foresight.stop()
        self._stop_meter()
        under_way, self._under_way = self._under_way, False
        kind, found = self._current, self._fingerprint
        if kind is not None and under_way and self._foresight.ran(kind):
            kind.due = True
        if kind is None or not under_way or self._is_part:
            return
        differs = found != kind.fingerprint
        if recorder is not None and (kind.plan is None or differs):
            kind.trace, kind.fingerprint, kind.forwards, kind.foreseen = recorder.trace(), found, forwards, False
            kind.structure = structure_of(kind.trace) if self.budget_bytes is not None else None
            self.events += [Recorded(what, why) for what, why in kind.trace.meta.items() if what != "torch"]
            if kind.plan is not None:
                self.record_anew(_ANOTHER_GRAPH)
            kind.due = True
        elif kind.plan is not None and self.budget_bytes is not None:
            self._watched[kind.structure] += kind.plan.keeps_all
            if differs:
                self.record_anew(_ANOTHER_GRAPH)

    def due(self, signature: Hashable = None) -> Trace | None:
        """The step of a kind, as for `begin` or the present one, whose plan is to be made; None where none is due."""
        kind = self._current if signature is None else self._kind_of(signature)
        if kind is not None and signature is not None and self.budget_bytes is not None:
            kind.due = self._foresight.fills(kind, signature, self._kinds) or kind.due
        return kind.trace if kind is not None and kind.due else None

    def put(self, plan: Plan | None, signature: Hashable = None) -> None:
        """Take the plan of the trace that was due, None where no such step is to come; the signature as for `due`."""
        kind = self._current if signature is None else self._kinds[signature]
        assert kind is not None
        kind.plan, kind.due = plan, False
        if plan is None:
            return
        root = self._root() if self._root is not None else None
        # looked up once a plan: to walk through all modules in each step takes ten times as long as to count
        self._hooks = [hooks for module in root.modules() for hooks in hooks_of(module)] if root is not None else []
        shapes = tuple(shapes_in(self._signature if signature is None else signature))
        self.events.append(PlanMade(plan.in_brief, shapes, kind.foreseen))

    def plan_with(self, planner: Planner, signature: Hashable = None) -> None:
        """Put a planner's plan where one is due; the signature as for `due`."""
        trace = self.due(signature)
        if trace is not None:
            self.put(planner(trace), signature)

    def outdate(self) -> None:
        """All plans are due again, because their conditions have changed."""
        for kind in self._kinds.values():
            kind.due = kind.due or (kind.trace is not None and kind.plan is not None)

    def abort(self) -> None:
        """Leave everything that is installed; for any exception, and harmless otherwise."""
        if self._under_way:  # it is called again before the next step, when what is installed tells nothing any more
            self.writes_unseen = self._writes_unseen()
            self.exchanged = self._exchanges()
            self.reached_bytes = self._reached() or self.reached_bytes
        for installed in (self._tape, self._recorder):
            if installed is not None:
                installed.__exit__(RuntimeError, None, None)
        self._tape = self._recorder = None
        self._stop_watch()
        self._foresight.stop()
        self._under_way = False
        self._stop_meter()

    def _writes_unseen(self) -> bool:
        if self._recorder is not None:
            return self._recorder.log.writes_unseen()
        return self.trace is not None and any(v.op < 0 and v.pin == WRITTEN_UNSEEN for v in self.trace.values)

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

    def _stop_meter(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self.measured_peak_bytes = self._meter.live.peak
            self._meter = None

    def _evictor(self, reached_bytes: int = 0, passing: Tensors = ()) -> Evictor | None:
        if self.budget_bytes is None:
            return None
        room = max(self.budget_bytes - max(self.static_bytes + self._beside_bytes, reached_bytes), 0)
        # An op's size is known when it has run. A step of a new kind has ops like those of others, but where one kind
        # had an op that fills half of the room, to keep as much free would evict all of a smaller one.
        evictor = Evictor(room, reserve_bytes=min(self._reserve_bytes, room // 2), passing=passing)
        self._beside_bytes -= evictor.live.now
        return evictor

    def record_anew(self, where: str) -> None:
        """The last step was not that of its plan: the next of its kind is recorded; ``where`` it differed, in words."""
        kind = self._current
        if not where or kind is None:
            return
        kind.divergences += 1
        self._watched.clear()
        self.events.append(Differed(where))
        if kind.divergences <= MAX_DIVERGENCES and self.guided:
            kind.plan, kind.due = None, False
