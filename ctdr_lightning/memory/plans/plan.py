"""A plan: what happens to each saved value between its forward and its backward use."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from ctdr_lightning.basics.documents import parse_document, read_record
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.memory.tape.sleeper import Regions
from ctdr_lightning.memory.traces.trace import OpRecord, Trace
from ctdr_lightning.memory.values.op_traits import TRACKED_VIEWS

PLAN_VERSION = 2
KINDS = ("keep", "recompute", "offload", "compress")
STAYS = {"kept", "no", "awaited", "needed"}


@dataclass(frozen=True, slots=True)
class Action:
    """What happens to one value.

    Attributes:
        kind: ``"keep"``, ``"recompute"``, ``"offload"`` or ``"compress"``.
        cache: Recompute only: hold the value after its first replay for its next use (speed-centric), or make it again
            each
            time (memory-centric).
        holder: Where an offloaded or compressed value waits.
    """

    kind: str
    cache: bool = True
    holder: str = ""


KEEP = Action("keep")
RECOMPUTE = Action("recompute")
RECOMPUTE_EACH = Action("recompute", cache=False)
Actions = Mapping[int, Action]


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """What the tape does at one forward op.

    Attributes:
        op: Name of the op that is expected.
        shape: Shape of its first output, to notice a step that differs.
        replay: Whether its outputs are dropped and made again by running it once more.
        stays: For each output of a replayed op: ``"kept"`` (held from the start), or whether it stays once replayed:
            ``"no"``,
            ``"awaited"`` (for as long as autograd awaits it) or ``"needed"`` (for as long as any replay may read it).
        saves: Whether autograd saves, between this op and the next, anything that is dropped.
        region: How many forwards of modules have begun before it; -1 where that is not known.
        writes: Whether it writes over something in a storage that a replay reads.
    """

    op: str
    shape: tuple[int, ...]
    replay: bool = False
    stays: tuple[str, ...] = ()
    saves: bool = True
    region: int = -1
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """One value's action with what it is worth, for people."""

    value: int
    module: str
    op: str
    n_bytes: int
    seconds: float
    action: Action

    def sentence(self) -> str:
        """The decision in one sentence."""
        where, size = f"{self.module} ({self.op.split('.')[1]})", format_bytes(self.n_bytes)
        if self.action.kind == "keep":
            return f"{where}: kept, holds {size} and saves {format_seconds(self.seconds)} of recomputation"
        if self.action.kind == "recompute":
            again = "" if self.action.cache else ", each time it is used"
            return f"{where}: recomputed, frees {size} for {format_seconds(self.seconds)}{again}"
        return f"{where}: {self.action.kind} to {self.action.holder}, frees {size}"


@dataclass(frozen=True)
class Plan:
    """An action for every saved value of a trace, with what it is predicted to cost.

    Attributes:
        policy: Name of the policy that made it.
        decisions: One entry a saved value, and one for each unsaved value that is held.
        script: One line a forward op: what the tape does.
        budget_bytes: The budget it was made for; None where there was none.
        peak_bytes: Predicted peak of the step, weights and gradients included.
        seconds: Predicted time of the step.
        recompute_seconds: How much of it is recomputation.
        bound_seconds: No plan for this budget can be faster; 0 where no bound was computed.
        exact: Whether the step's results are bit-identical to the plain step's.
        n_training: How many forwards of modules in training mode begin before the last op of the forward; -1 where
            that is not known.
    """

    policy: str
    decisions: tuple[Decision, ...]
    script: tuple[ScriptLine, ...]
    budget_bytes: int | None = None
    peak_bytes: int = 0
    seconds: float = 0.0
    recompute_seconds: float = 0.0
    bound_seconds: float = 0.0
    exact: bool = True
    n_training: int = -1

    @property
    def actions(self) -> dict[int, Action]:
        """From value id to action."""
        return {d.value: d.action for d in self.decisions}

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is dropped, so that nothing need be installed."""
        return not any(line.replay for line in self.script)

    @cached_property
    def regions(self) -> Regions:
        """Where the tape has anything to do; found once for all steps."""
        return Regions(self.script, self.n_training)

    @property
    def gap(self) -> float:
        """By which share the plan may be slower than the best: 0.03 is 3 %; infinite where no bound is known."""
        return self.seconds / self.bound_seconds - 1 if self.bound_seconds else float("inf")

    def explain(self) -> str:
        """The plan in words: a summary, then one sentence a decision, the largest first."""
        budget = f", budget {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        gap = f", at most {self.gap:.1%} above the best possible" if self.bound_seconds else ""
        head = (
            f"Policy {self.policy}: predicted peak {format_bytes(self.peak_bytes)}{budget}; predicted step "
            f"{format_seconds(self.seconds)}, of it {format_seconds(self.recompute_seconds)} recomputation{gap}."
        )
        order = sorted(self.decisions, key=lambda d: -d.n_bytes)
        return "\n".join([head, *(d.sentence() for d in order)])

    def to_json(self, path: str | Path | None = None) -> str:
        """Write the plan as versioned JSON, one decision a line; returns the text.

        Args:
            path: File to write; it is complete or absent, never half-written.
        """
        head = {k: v for k, v in asdict(replace(self, decisions=(), script=())).items() if v != ()}
        lines = [json.dumps({"kind": "plan", "version": PLAN_VERSION, **head})[:-1]]
        for name, rows in (("decisions", self.decisions), ("script", self.script)):
            body = ",\n".join(json.dumps(asdict(row)) for row in rows)
            lines.append(f'"{name}": [\n{body}\n]')
        text = ",\n".join(lines) + "}\n"
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Read a plan from JSON text or a file.

        Raises:
            CheckpointError: When the text is no plan of this version.
        """
        data = parse_document(source, "plan", PLAN_VERSION)
        try:
            plan = read_record(cls, {k: v for k, v in data.items() if k not in ("kind", "version")})
            plan._check()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"This plan is damaged: {error!r}.", "Make the plan again.") from error
        return plan

    def _check(self) -> None:
        """Raise where an action or a script line means nothing."""
        for decision in self.decisions:
            if decision.action.kind not in KINDS:
                raise ValueError(f"action {decision.action.kind!r}")
        for line in self.script:
            if not set(line.stays) <= STAYS:
                raise ValueError(f"stays {line.stays!r}")
        self.explain()


def action_of(trace: Trace, actions: Actions, value: int) -> Action:
    """A value's action: as given, else keep for what autograd saved; what it did not is made again each time.

    Values that may not be recomputed are kept whatever is asked; those that are written over cannot be held.
    """
    if value not in trace.droppable:
        return KEEP
    given = actions.get(value)
    if given is not None:
        return RECOMPUTE if given.kind == "keep" and value in trace.fleeting else given
    return KEEP if trace.values[value].saves else RECOMPUTE_EACH


def dropped_values(trace: Trace, actions: Actions) -> set[int]:
    """Every value that a plan makes again: what it drops, and what is needed on the way back to what it keeps."""
    stack = [v for v in trace.saved if action_of(trace, actions, v).kind == "recompute"]
    found: set[int] = set()
    while stack:
        value = stack.pop()
        if value in found or action_of(trace, actions, value).kind != "recompute":
            continue
        found.add(value)
        stack.extend(trace.ops[trace.values[value].op].inputs)
    return found


def write_script(trace: Trace, actions: Actions) -> tuple[ScriptLine, ...]:
    """What the tape does at each forward op so that exactly the plan's values are dropped."""
    dropped = dropped_values(trace, actions)
    saving, written = _saving_ops(trace, dropped), _writing_ops(trace, dropped)
    lines = []
    for place, index in enumerate(trace.forward_ops):
        op, saves, writes = trace.ops[index], place in saving, index in written
        first = op.outputs[0] if op.outputs else -1
        shape = trace.values[first].shape if first >= 0 and trace.values[first].op == index else ()
        if dropped.isdisjoint(op.outputs) or _is_plain_view(trace, op):
            lines.append(ScriptLine(op.name, shape, saves=saves, region=op.region, writes=writes))
        else:
            stays = tuple(_stays(trace, actions, v) for v in op.outputs)
            lines.append(ScriptLine(op.name, shape, True, stays, saves, op.region, writes))
    return tuple(lines)


def _is_plain_view(trace: Trace, op: OpRecord) -> bool:
    """Whether the tape finds what the op makes by itself: a view of something that was not written in place."""
    if op.name not in TRACKED_VIEWS:
        return False
    record = trace.values[op.outputs[0]]
    return record.op >= 0 and trace.storages[record.storage].born == trace.ops[record.op].tick


def _saving_ops(trace: Trace, values: set[int]) -> set[int]:
    """Places in the forward after which autograd saves one of the values."""
    ticks = [trace.ops[index].tick for index in trace.forward_ops]
    return {bisect_right(ticks, save.packed) - 1 for v in values for save in trace.values[v].saves}


def _writing_ops(trace: Trace, dropped: set[int]) -> set[int]:
    """Ops that write over something in a storage which a replay reads or makes."""
    read = {source for v in dropped for source in trace.ops[trace.values[v].op].inputs}
    places = {trace.values[v].storage for v in read | dropped}
    written = (v for v in trace.values if v.storage in places and v.op >= 0)
    return {v.op for v in written if trace.storages[v.storage].born != trace.ops[v.op].tick}


def _stays(trace: Trace, actions: Actions, value: int) -> str:
    if value < 0:
        return "no"
    action = action_of(trace, actions, value)
    if action.kind != "recompute":
        return "kept"
    if not action.cache:
        return "no"
    return "awaited" if trace.values[value].saves else "needed"
