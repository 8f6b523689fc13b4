"""What was chosen for a budget, as data: ranks, memory plan, what they cost, and what else was looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.documents import parse_document, plain_of, read_record
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.memory.plans.plan import Plan

BUDGET_FIT_VERSION = 1


@dataclass(frozen=True)
class Considered:
    """One candidate that the search looked at.

    Attributes:
        share: Share of the resource that all layers keep together; 1 is the dense model.
        resource: ``"parameters"`` or ``"seconds"``.
        parameters: Parameters of the model.
        keep_peak_bytes: Predicted peak of its step without a plan.
        peak_bytes: Predicted peak under its plan; where none fits, the least.
        seconds: Predicted seconds under its plan; 0 where none fits.
        loss: Measured KL(dense || candidate) in nats; -1 where it was not measured.
        measured_slowdown: Its step in dense steps, timed in turns; 0 where it was not timed.
        outcome: What became of it, in words.
        metric: Its metric, refined; None where it was not measured.
    """

    share: float
    resource: str
    parameters: int
    keep_peak_bytes: int
    peak_bytes: int
    seconds: float
    loss: float
    measured_slowdown: float
    outcome: str
    metric: float | None = None


@dataclass(frozen=True)
class MetricChange:
    """What ranks cost in a metric of the user's own, before any training.

    Attributes:
        name: What the metric is called.
        dense: The dense model's.
        chosen: The chosen model's, its factors refined.
        allowed: How much worse it was allowed to be.
        n_batches: How many batches it was measured on.
        higher_is_better: Whether it falls where a model gets worse.
    """

    name: str
    dense: float
    chosen: float
    allowed: float
    n_batches: int
    higher_is_better: bool = True

    @property
    def drop(self) -> float:
        """How much worse the chosen model is; below 0 where it is better."""
        return self.dense - self.chosen if self.higher_is_better else self.chosen - self.dense

    def __str__(self) -> str:
        batches = "1 batch" if self.n_batches == 1 else f"{self.n_batches} batches"
        return (
            f"{self.name} {self.dense:.4f} dense, {self.chosen:.4f} chosen on {batches}: {self.drop:.4f} worse "
            f"({self.allowed:g} allowed)"
        )


@dataclass(frozen=True)
class LayerCost:
    """One layer in the chosen step.

    Attributes:
        name: Dotted name in the model.
        kind: Class of the dense layer.
        method: Method; empty where the layer stays dense.
        ranks: Its ranks, input side first.
        parameters_before: Weights and bias of the dense layer.
        parameters_after: Weights and bias now.
        error: Relative error of the weight; 0 where dense.
        kept_bytes: What autograd holds inside the layer without a plan.
        freed_bytes: How much of it the plan drops and makes again.
        recompute_s: Seconds that this takes.
        reason: Why the layer became what it is.
    """

    name: str
    kind: str
    method: str
    ranks: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    error: float
    kept_bytes: int
    freed_bytes: int
    recompute_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """The fields of a budget fit that are read from JSON as they stand."""

    loss: float
    budget_bytes: int
    max_slowdown: float
    dense_peak_bytes: int
    keep_peak_bytes: int
    dense_s: float
    seconds: float
    measured_slowdown: float
    measured_peak_bytes: int
    parameters_before: int
    parameters_after: int
    search_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BudgetFit(_Numbers):
    """Ranks and memory plan for one budget, with their predicted and measured costs. Plain data.

    Attributes:
        choices: What becomes of each layer.
        plan: What happens to each saved value of a step on the batch that was looked at.
        loss: Measured KL(dense || chosen) of the outputs in nats: what the ranks cost before any training.
        budget_bytes: The budget; 0 where there was none.
        max_slowdown: How many dense steps the chosen step was allowed to take.
        dense_peak_bytes: Predicted peak of the dense step without a plan, optimizer state included.
        keep_peak_bytes: The same of the chosen model.
        dense_s: Seconds of the dense step.
        seconds: Predicted seconds of the chosen step, forward and backward, the tape's own time included.
        measured_slowdown: The chosen step in dense steps, timed in turns; 0 where it could not be timed.
        measured_peak_bytes: Peak of the chosen step as counted in a run, optimizer state included.
        parameters_before: Parameters of the dense model.
        parameters_after: Parameters of the chosen one.
        layers: One row a layer.
        considered: Every candidate that was looked at, in order.
        metric: What the ranks cost in the metric that was given; None without one.
        search_s: Seconds that the choice took.
    """

    choices: Choices
    plan: Plan
    layers: tuple[LayerCost, ...] = ()
    considered: tuple[Considered, ...] = ()
    metric: MetricChange | None = None

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the chosen step, weights, gradients and optimizer state included."""
        return self.plan.peak_bytes

    @property
    def is_dense(self) -> bool:
        """Whether the answer is the dense model, under a plan or without one."""
        return not self.choices.factorized

    def __str__(self) -> str:
        return "\n".join([_layer_table(self), "", *self.sentences()])

    def sentences(self) -> list[str]:
        """What was chosen and what it costs, a sentence each."""
        budget = f" for a budget of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        what = "the dense model" if self.is_dense else f"{_counted(len(self.choices.factorized), 'layer')} factorized"
        how = "nothing recomputed" if self.plan.keeps_all else "with recomputation"
        timed = f"{self.measured_slowdown:.2f} dense steps by the clock" if self.measured_slowdown else "not timed"
        metric = [f"In the metric: {self.metric}."] if self.metric is not None else []
        return [
            f"Chosen{budget}: {what}, {how}.",
            f"Parameters: {self.parameters_before:,} -> {self.parameters_after:,}.",
            f"Peak of a step: dense {format_bytes(self.dense_peak_bytes)}, chosen without a plan "
            f"{format_bytes(self.keep_peak_bytes)}, with it {format_bytes(self.peak_bytes)} predicted, "
            f"{format_bytes(self.measured_peak_bytes)} measured.",
            f"Time of a step: dense {format_seconds(self.dense_s)}, chosen {format_seconds(self.seconds)} predicted, "
            f"of it {format_seconds(self.plan.recompute_seconds)} recomputation; {timed}.",
            f"Expected cost: KL {self.loss:.4f} nats to the dense outputs, before any training.",
            *metric,
            f"Looked at: {_counted(len(self.considered), 'candidate')}, in {self.search_s:.1f} s.",
        ]

    def to_json(self, path: str | Path | None = None) -> str:
        """Write it as versioned JSON; returns the text.

        Args:
            path: File to write; it is complete or absent, never half-written.
        """
        plain: dict[str, Any] = {"kind": "budget fit", "version": BUDGET_FIT_VERSION}
        plain |= {field.name: getattr(self, field.name) for field in fields(self)}
        plain |= {"choices": self.choices.to_dict(), "plan": json.loads(self.plan.to_json())}
        plain |= {name: [asdict(row) for row in getattr(self, name)] for name in ("layers", "considered")}
        plain |= {"metric": plain_of(self.metric)}
        text = json.dumps(plain, indent=1) + "\n"
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> BudgetFit:
        """Read what `to_json` wrote, perhaps edited by hand.

        Raises:
            CheckpointError: When the text is no such record of this version.
        """
        data = parse_document(source, "budget fit", BUDGET_FIT_VERSION)
        try:
            rest = {name: item for name, item in data.items() if name not in ("kind", "version", "choices", "plan")}
            layers, considered, metric = rest.pop("layers"), rest.pop("considered"), rest.pop("metric", None)
            return cls(
                choices=Choices.from_dict(data["choices"]),
                plan=Plan.from_json(json.dumps(data["plan"])),
                layers=tuple(read_record(LayerCost, row) for row in layers),
                considered=tuple(read_record(Considered, row) for row in considered),
                metric=read_record(MetricChange, metric) if metric is not None else None,
                **asdict(read_record(_Numbers, rest)),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise CheckpointError(f"This budget fit is damaged: {error!r}.", "Choose again.") from error


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _layer_table(fit: BudgetFit) -> str:
    rows = [("layer", "kind", "method", "ranks", "parameters", "error", "kept", "freed", "for", "why")]
    for row in fit.layers:
        after = "" if not row.method else f" -> {row.parameters_after:,}"
        freed = (format_bytes(row.freed_bytes), format_seconds(row.recompute_s)) if row.freed_bytes else ("", "")
        kept = format_bytes(row.kept_bytes) if row.kept_bytes else ""
        error = f"{row.error:.4f}" if row.method else ""
        ranks = " x ".join(map(str, row.ranks))
        parameters = f"{row.parameters_before:,}{after}"
        rows.append((row.name, row.kind, row.method or "dense", ranks, parameters, error, kept, *freed, row.reason))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a text table, the first row its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * min(max(map(len, lines)), 120), *lines[1:]])
