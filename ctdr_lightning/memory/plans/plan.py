"""A plan: one action for each saved value between its forward and its backward use.

A plan is a recorded step and an action for each of its values. Everything else follows from these two and is derived,
never stored beside them: the tape's script, the predicted peak and time, the sentences for people. A plan therefore
cannot contradict itself, in memory or in a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.documents import damaged, parse_document, plain_of, read_record
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.made_once import MadeOnce
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.memory.allocator.reserved import Reserved, reserved_by
from ctdr_lightning.memory.plans.regions import Regions
from ctdr_lightning.memory.plans.script import ScriptLine, write_script
from ctdr_lightning.memory.simulator.actions import (
    KEEP,
    Action,
    Actions,
    Away,
    Compress,
    Offload,
    Recompute,
    action_of,
    away_values,
)
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.simulator.transfers import Transfers
from ctdr_lightning.memory.traces.trace import LEAN, Trace

PLAN_VERSION = 6
Option = int | float | str | bool
_DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
# Of the host, by the steps of ViT-B/16 and GPT-2 medium on an H200 (docs/data/gpu-h200.json): for an op that the tape
# sees, and for one of the forward, of which half are views.
_SEEN_S, _OP_S = 45e-6, 5e-6
_ROUNDING = 1 + 1e-6  # a linear program's optimum may lie above the true one by its solver's tolerance


@dataclass(frozen=True, slots=True)
class Decision:
    """One value's action and its effect, for people.

    Attributes:
        value: Id of the value in the trace.
        module: Path of the module that made it.
        op: Name of the op that made it.
        n_bytes: Size of the allocation behind it.
        seconds: Time of one replay of its op.
        action: Its action.
        note: How long its transfers are waited for, or that they are hidden; empty for other actions.
    """

    value: int
    module: str
    op: str
    n_bytes: int
    seconds: float
    action: Action
    note: str = ""

    def sentence(self) -> str:
        """The decision in one sentence."""
        short = self.op.split(".")[1] if "." in self.op else self.op
        where, size = f"{self.module} ({short})", format_bytes(self.n_bytes)
        if isinstance(self.action, Recompute):
            again = "" if self.action.stays else ", each time it is used"
            return f"{where}: recomputed, frees {size} for {format_seconds(self.seconds)}{again}"
        if isinstance(self.action, (Offload, Compress)):
            return f"{where}: {_whereabouts(self.action)}, frees {size}{self.note and ', ' + self.note}"
        return f"{where}: kept, holds {size} and saves {format_seconds(self.seconds)} of recomputation"


def _without_away(action: Action) -> Action:
    return KEEP if isinstance(action, (Offload, Compress)) else action


def _notes(transfers: Transfers) -> dict[int, str]:
    """Notes on how well each value's transfers are hidden."""
    waits: dict[int, float] = {}
    for move in transfers.moves:
        waits[move.value] = waits.get(move.value, 0.0) + move.wait_s
    return {v: f"waited for {format_seconds(s)}" if s else "hidden behind the step" for v, s in waits.items()}


def _whereabouts(action: Away) -> str:
    smaller = f" as {'+'.join(action.codecs)}" if action.codecs else ""
    if isinstance(action, Compress):
        return f"held{smaller}"
    return f"to {action.to}{smaller} at op {action.out_at}, gone by {action.gone_by}, back from {action.back_at}"


@dataclass(frozen=True)
class _ActionRow:
    """An action by value id, as a row of the document."""

    value: int
    action: Action


@dataclass(frozen=True, eq=False)
class Plan(MadeOnce):
    """An action for every saved value of a trace, with the simulator's prediction.

    Attributes:
        policy: Name of the policy that made it.
        timeline: The simulated step: its trace, the actions, bytes at each tick, seconds.
        budget_bytes: The budget that it was made for; None where there was none.
        bound_seconds: No plan for this budget can be faster; 0 where no bound was computed.
        options: The policy's options by name.

    Example:
        >>> import torch
        >>> from ctdr_lightning import plan, record
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
        >>> made = plan(record(lambda: net(x).sum()), policy="sqrt")
        >>> Plan.from_json(made.to_json()) == made
        True
    """

    policy: str
    timeline: Timeline = field(repr=False)
    budget_bytes: int | None = None
    bound_seconds: float = 0.0
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """The recorded step that the plan is for."""
        return self.timeline.trace

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step, with everything else that is in memory: weights, gradients, optimizer state."""
        return self.timeline.peak_bytes

    @property
    def forward_peak_bytes(self) -> int:
        """The part of ``peak_bytes`` that is reached before the forward's last op is over."""
        return self.timeline.forward_peak_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of the step."""
        return self.timeline.seconds

    @property
    def recompute_seconds(self) -> float:
        """Predicted time of recomputation."""
        return self.timeline.recompute_seconds

    @cached_property
    def actions(self) -> dict[int, Action]:
        """From value id to action, for each saved value and each unsaved one of which something was said."""
        trace, given = self.trace, self.timeline.actions
        return {
            v: self.away.get(v) or _without_away(action_of(trace, given, v))
            for v, record in enumerate(trace.values)
            if record.op >= 0 and (record.saves or (v in given and v in trace.droppable))
        }

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """The actions and their effects."""
        trace = self.trace
        notes = _notes(self.timeline.transfers)
        makers = {v: trace.values[v].op for v in self.actions}
        return tuple(
            Decision(
                value=v,
                module=trace.module_of(v),
                op=trace.ops[makers[v]].name,
                n_bytes=trace.value_bytes(v),
                seconds=trace.replay_seconds(makers[v]),
                action=action,
                note=notes.get(v, ""),
            )
            for v, action in self.actions.items()
        )

    @cached_property
    def away(self) -> dict[int, Away]:
        """From value id to action, of all that is put away."""
        return away_values(self.trace, self.timeline.actions)

    @cached_property
    def script(self) -> tuple[ScriptLine, ...]:
        """The tape's work, one line for each op of the forward."""
        return write_script(self.trace, self.timeline.actions)

    @cached_property
    def keeps_all(self) -> bool:
        """Whether nothing is dropped, so that nothing need be installed."""
        return not any(line.replay or line.sends for line in self.script)

    @cached_property
    def regions(self) -> Regions:
        """The parts of the step in which the tape is needed."""
        return Regions(self.script, self.trace.n_training)

    @cached_property
    def n_seen(self) -> int:
        """Number of ops of the forward that the tape sees: it sleeps in regions without work of the plan."""
        if self.keeps_all or not self.regions.worthwhile:
            return 0 if self.keeps_all else len(self.script)
        return sum(self.regions.busy[line.region] for line in self.script)

    @cached_property
    def host_wait_seconds(self) -> float:
        """Predicted time for which a GPU waits in the forward, as its host is at work for the tape; 0 elsewhere."""
        return 0.0 if self.keeps_all else host_wait_seconds(self.trace, self.n_seen)

    @property
    def wall_seconds(self) -> float:
        """Predicted time of the step by the clock: `seconds`, and the wait for the host."""
        return self.seconds + self.host_wait_seconds

    @cached_property
    def reserved(self) -> Reserved:
        """Bytes that CUDA's allocator would reserve for the repeated step, segments and fragmentation included."""
        return reserved_by(self.trace, self.timeline.actions)

    @property
    def exact(self) -> bool:
        """Whether the step's results are bit-identical to the plain step's: not with a lossy codec."""
        lossy = {cost.name for cost in self.trace.codecs if not cost.exact}
        return all(lossy.isdisjoint(action.codecs) for action in self.away.values())

    @property
    def gap(self) -> float:
        """By which share the plan may be slower than the best: 0.03 is 3 %; infinite where no bound is known."""
        return self.seconds / self.bound_seconds - 1 if self.bound_seconds else float("inf")

    @property
    def slowdown(self) -> float:
        """Predicted time by the clock, in plain steps; 0 where no op has a time."""
        return self.wall_seconds / self.trace.seconds if self.trace.seconds else 0.0

    @property
    def in_brief(self) -> str:
        """The plan as a sentence, its time relative to that of the plain step."""
        time = f"; predicted time x{self.slowdown:.2f} of the plain step's" if self.slowdown else ""
        return f"{self._bytes_in_words()}{time}{self._gap_in_words()}."

    def _bytes_in_words(self) -> str:
        budget = f", budget {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        return f"Policy {self.policy}: predicted peak {format_bytes(self.peak_bytes)}{budget}"

    def _gap_in_words(self) -> str:
        return f", at most {self.gap:.1%} slower than the fastest possible plan" if self.bound_seconds else ""

    def explain(self) -> str:
        """The plan in words: a summary, how the step is leaner than a plain one, then the decisions by size."""
        wait = f"; {format_seconds(self.host_wait_seconds)} more for the host" if self.host_wait_seconds else ""
        recomputation = format_seconds(self.recompute_seconds)
        time = f"predicted step {format_seconds(self.seconds)}, of it {recomputation} recomputation"
        head = f"{self._bytes_in_words()}; {time}{self._gap_in_words()}{wait}."
        order = sorted(self.decisions, key=lambda d: -d.n_bytes)
        lean = self.trace.meta.get(LEAN)
        return "\n".join([head, *([lean] if lean else []), *(d.sentence() for d in order)])

    def __eq__(self, other: object) -> bool:
        """Whether both are the same actions for the same step, made for the same budget by the same policy."""
        return isinstance(other, Plan) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> tuple[Any, ...]:
        return self.policy, self.budget_bytes, self.bound_seconds, dict(self.options), self.actions, self.trace

    def to_json(self, path: str | Path | None = None) -> str:
        """Write the plan as versioned JSON: its actions, one a line, and the trace; returns the text.

        Args:
            path: File to write; it is complete or absent, never half-written.
        """
        head = {
            "kind": "plan",
            "version": PLAN_VERSION,
            "policy": self.policy,
            "budget_bytes": self.budget_bytes,
            "bound_seconds": self.bound_seconds,
            "options": dict(self.options),
        }
        rows = ",\n".join(json.dumps(plain_of(_ActionRow(*item))) for item in self.actions.items())
        text = f'{json.dumps(head)[:-1]},\n"actions": [\n{rows}\n],\n"trace": {self.trace.to_json()}}}\n'
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Read a plan from JSON text or a file.

        The script and the predictions are made anew from the trace and the actions that the file holds.

        Raises:
            CheckpointError: If the text is not a plan of this version, or its actions do not fit its trace.
        """
        data = parse_document(source, "plan", PLAN_VERSION)
        try:
            trace = Trace.from_document(data["trace"])
            rows = [read_record(_ActionRow, row) for row in data["actions"]]
            header = {name: data[name] for name in ("policy", "budget_bytes", "bound_seconds")}
            timeline, options = simulate(trace, _fitting(trace, rows)), _options(data["options"])
            plan = cls(timeline=timeline, options=options, **plain_of(read_record(_Header, header)))
            plan._check()
        except _DAMAGE as error:
            raise damaged("plan", error, "Make the plan again.") from error
        return plan

    def _check(self) -> None:
        """Raise ValueError if a statement about the plan is false."""
        if self.budget_bytes is not None and not self.peak_bytes <= self.budget_bytes:
            raise ValueError(f"its actions take {self.peak_bytes} bytes, its budget is {self.budget_bytes}")
        if not 0 <= self.bound_seconds <= _ROUNDING * self.seconds:
            raise ValueError(f"its actions take {self.seconds} s, its lower bound is {self.bound_seconds}")
        self.explain()


@dataclass(frozen=True)
class _Header:
    """The header of a plan's document: everything but its actions and its trace."""

    policy: str
    budget_bytes: int | None
    bound_seconds: float


def host_wait_seconds(trace: Trace, n_seen: int) -> float:
    """Predicted time for which a GPU waits in the forward, where the tape sees so many ops of it; 0 on other devices.

    Args:
        trace: The step; a compiled graph has no tape, and no wait.
        n_seen: Number of ops.
    """
    ops = [trace.ops[op] for op in trace.forward_ops]
    if trace.device != "cuda" or any(op.region < 0 for op in ops):
        return 0.0
    return max(0.0, _SEEN_S * n_seen + _OP_S * len(ops) - sum(op.seconds for op in ops))


def most_away_bytes(plans: Iterable[Plan]) -> dict[str, int]:
    """The most that any of some plans puts into each place, by its name, as if no codec made it less."""
    most: dict[str, int] = {}
    for plan in plans:
        here: Counter[str] = Counter()
        for value, action in plan.away.items():
            if isinstance(action, Offload):
                here[action.to] += plan.trace.value_bytes(value)
        most |= {to: max(n_bytes, most.get(to, 0)) for to, n_bytes in here.items()}
    return most


def _options(found: Any) -> dict[str, Option]:
    """The options of a document: a name and a plain value each."""
    if not isinstance(found, dict) or not all(type(value) in (int, float, str, bool) for value in found.values()):
        raise ValueError(f"its options are {found!r}")
    return dict(found)


def _fitting(trace: Trace, rows: list[_ActionRow]) -> Mapping[int, Action]:
    """The actions of a document, each of which the trace must allow."""
    actions: Actions = {row.value: row.action for row in rows}
    if len(actions) < len(rows):
        raise ValueError("two actions for one value")
    for value, action in actions.items():
        if not 0 <= value < len(trace.values) or trace.values[value].op < 0:
            raise ValueError(f"an action for value {value}, which the step does not make")
        if action_of(trace, actions, value) != action:
            raise ValueError(f"value {value} cannot be {action}: {trace.values[value].pin or 'it is written over'}")
    return actions
