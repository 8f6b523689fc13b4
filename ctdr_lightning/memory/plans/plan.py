"""A plan: what happens to each saved value between its forward and its backward use."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ctdr_lightning.basics.documents import parse_document, plain_of, read_record
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.memory.plans.actions import Action, Recompute
from ctdr_lightning.memory.plans.regions import Regions
from ctdr_lightning.memory.plans.script import STAYS, ScriptLine

PLAN_VERSION = 3


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
        if isinstance(self.action, Recompute):
            again = "" if self.action.stays else ", each time it is used"
            return f"{where}: recomputed, frees {size} for {format_seconds(self.seconds)}{again}"
        return f"{where}: kept, holds {size} and saves {format_seconds(self.seconds)} of recomputation"


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
        head = {k: v for k, v in plain_of(replace(self, decisions=(), script=())).items() if v != []}
        lines = [json.dumps({"kind": "plan", "version": PLAN_VERSION, **head})[:-1]]
        for name, rows in (("decisions", self.decisions), ("script", self.script)):
            body = ",\n".join(json.dumps(plain_of(row)) for row in rows)
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
        """Raise where a script line means nothing."""
        for line in self.script:
            if not set(line.stays) <= STAYS:
                raise ValueError(f"stays {line.stays!r}")
        self.explain()
