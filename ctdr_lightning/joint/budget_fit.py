"""The choice for a budget, as data: ranks, memory plan, their costs, and all candidates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.columns import aligned
from ctdr_lightning.basics.documents import damaged, parse_document, plain_of, read_record
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.decomposition.choose.by_share import Start
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.report import Report
from ctdr_lightning.joint.considered import OPTION_HEAD, Considered, Option, options_of
from ctdr_lightning.memory.lean.tiles import tiles_in_words
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.traces.trace import Trace

BUDGET_FIT_VERSION = 2
_NOT_IN_JSON = ("dense_step", "hindrances")
CLOCK_ERROR = 1.05  # medians of a few pairs of steps spread by 3 %: a step of 1.05 of a limit still keeps it


@dataclass(frozen=True)
class MetricChange:
    """Change of a user's metric by the ranks, before any training.

    Attributes:
        name: Name of the metric.
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
        """Drop of the chosen model; negative if it is better."""
        return self.dense - self.chosen if self.higher_is_better else self.chosen - self.dense

    def __str__(self) -> str:
        batches = "1 batch" if self.n_batches == 1 else f"{self.n_batches} batches"
        return (
            f"{self.name} {self.dense:.4f} dense, {self.chosen:.4f} chosen on {batches}: {self.drop:.4f} worse "
            f"({self.allowed:g} allowed)"
        )


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """The fields of a budget fit that are read from JSON unchanged."""

    budget_bytes: int
    max_slowdown: float
    dense_peak_bytes: int
    keep_peak_bytes: int
    dense_s: float
    seconds: float
    measured_slowdown: float
    measured_peak_bytes: int
    search_s: float = 0.0
    untrained: bool = False


@dataclass(frozen=True, kw_only=True)
class BudgetFit(_Numbers):
    """Ranks and memory plan for one budget, with their predicted and measured costs. Plain data.

    Attributes:
        choices: The choice for each layer.
        plan: The actions for each saved value of a step on the recorded batch.
        report: The outcome of each layer, and the plan's bytes inside it.
        budget_bytes: The budget; 0 without one.
        max_slowdown: Longest allowed step, in dense steps.
        dense_peak_bytes: Predicted peak of the dense step without a plan, optimizer state included.
        keep_peak_bytes: The same of the chosen model.
        dense_s: Seconds of the dense step.
        seconds: Predicted seconds of the chosen step, forward and backward, the tape's own time included.
        measured_slowdown: The chosen step in dense steps, timed in turns; 0 where it could not be timed.
        measured_peak_bytes: Peak of the chosen step as counted in a run, optimizer state included; 0 where the run had
            no memory for it.
        considered: Every candidate, in order.
        metric: Change of the user's metric; None without one.
        leaving_out: Names of the chosen model's large linear layers, where their outputs are left out: the plan is for
            steps whose forward runs in ``LazyHeads(model, fit.leaving_out)``.
        tiles: From names of modules to their numbers of tiles, where they run so: the plan is for steps whose forward
            runs in ``TiledModules(model, fit.tiles)``.
        start: Weighting of errors by which the chosen factors were made.
        search_s: Seconds that the choice took.
        untrained: Whether layers were cut of a network whose weights have the spectra of random numbers.
        hindrances: Why other means could not take the place of a cut, by their names in words; not in JSON.
        dense_step: The dense model's step on the recorded batch, with all resident bytes; None where the fit was read
            from JSON, which leaves it out.
    """

    choices: Choices
    plan: Plan
    report: Report
    considered: tuple[Considered, ...] = ()
    metric: MetricChange | None = None
    leaving_out: tuple[str, ...] = ()
    tiles: Mapping[str, int] = field(default_factory=dict)
    start: Start = field(default_factory=Start)
    hindrances: Mapping[str, str] = field(default_factory=dict)
    dense_step: Trace | None = None

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the chosen step, weights, gradients and optimizer state included."""
        return self.plan.peak_bytes

    @property
    def loss(self) -> float:
        """Measured KL(dense || chosen) of the outputs in nats, before any training."""
        return self.report.divergence

    @property
    def parameters_before(self) -> int:
        """Parameters of the dense model."""
        return self.report.parameters_before

    @property
    def parameters_after(self) -> int:
        """Parameters of the chosen one."""
        return self.report.parameters_after

    @property
    def is_dense(self) -> bool:
        """Whether the answer is the dense model, under a plan or without one."""
        return not self.choices.factorized

    @property
    def options(self) -> tuple[Option, ...]:
        """At most six candidates: the dense model, the chosen one, and those that none beats in time and loss."""
        return options_of(self.considered, self.dense_s)

    def table(self) -> str:
        """The options with their costs, the chosen one marked."""
        lines = aligned([OPTION_HEAD, *(option.cells() for option in self.options)])
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def __str__(self) -> str:
        return "\n".join([str(self.report), "", self.table(), "", *self.sentences()])

    def sentences(self) -> list[str]:
        """The choice and its costs, as sentences."""
        budget = f" for a budget of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        what = "the dense model" if self.is_dense else f"{_counted(len(self.choices.factorized), 'layer')} factorized"
        how = "nothing recomputed" if self.plan.keeps_all else "with recomputation"
        timed = f"x{self.measured_slowdown:.2f} of it measured" if self.measured_slowdown else "not timed"
        peak = f"{format_bytes(self.measured_peak_bytes)} measured" if self.measured_peak_bytes else "not measured"
        metric = [f"In the metric: {self.metric}."] if self.metric is not None else []
        return [
            f"Chosen{budget}: {what}, {how}.",
            *(f"Reason: {row.reason}." for row in self.considered if row.reason),
            *([] if self.is_dense else [f"Parameters: {self.parameters_before:,} -> {self.parameters_after:,}."]),
            f"Peak of a step: dense {format_bytes(self.dense_peak_bytes)}, chosen without a plan "
            f"{format_bytes(self.keep_peak_bytes)}, with it {format_bytes(self.peak_bytes)} predicted, "
            f"{peak}.",
            f"Time of a forward and backward: dense {format_seconds(self.dense_s)}, chosen "
            f"x{self.seconds / self.dense_s:.2f} of it predicted, {timed}.",
            *self._cost(),
            *metric,
            *self._left_out(),
            *([f"{tiles_in_words(self.tiles)}."] if self.tiles else []),
            *self._without_a_cut(),
            *(f"Not possible: {means} ({reason.rstrip('.')})." for means, reason in self.hindrances.items()),
            f"Looked at: {_counted(len(self.considered), 'candidate')}, in {self.search_s:.1f} s.",
        ]

    def _cost(self) -> list[str]:
        """The loss by the cut; an exact plan has none."""
        if self.is_dense:
            return []
        cost = f"Expected cost: KL {self.loss:.4f} nats to the dense outputs, before any training."
        if not self.untrained:
            return [cost]
        return [
            cost,
            "The network looks untrained: its outputs tell no cost of a cut. Train it first, or use rank=None.",
        ]

    def _left_out(self) -> list[str]:
        if not self.leaving_out:
            return []
        return [f"Dense and chosen steps do without the outputs of {' and '.join(self.leaving_out)}: losses in chunks."]

    def _without_a_cut(self) -> list[str]:
        """The price of the budget for the dense model, or of the dense model for the step."""
        row = next((row for row in self.considered if row.resource == "dense"), None)
        if row is None or not self.budget_bytes:
            return []
        if self.is_dense:
            long = self.measured_slowdown > self.max_slowdown * CLOCK_ERROR
            return ["No cut was found that is faster and as good; max_slowdown= makes the time a limit."] * long
        if row.seconds:
            return [f"Without any cut this budget costs x{row.seconds / self.dense_s:.2f} of the dense step's time."]
        return [f"Without any cut no plan goes below {format_bytes(row.peak_bytes)}."]

    def to_json(self, path: str | Path | None = None) -> str:
        """Write it as versioned JSON; returns the text.

        Args:
            path: File to write; it is complete or absent, never half-written.
        """
        plain: dict[str, Any] = {"kind": "budget fit", "version": BUDGET_FIT_VERSION}
        plain |= {part.name: getattr(self, part.name) for part in fields(self) if part.name not in _NOT_IN_JSON}
        plain |= {"tiles": dict(self.tiles), "choices": self.choices.to_dict(), "plan": json.loads(self.plan.to_json())}
        plain |= {name: plain_of(getattr(self, name)) for name in ("report", "considered", "metric", "start")}
        text = json.dumps(plain, indent=1) + "\n"
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> BudgetFit:
        """Read the output of `to_json`, perhaps edited by hand.

        Raises:
            CheckpointError: If the text is no such record of this version.
        """
        data = parse_document(source, "budget fit", BUDGET_FIT_VERSION)
        try:
            rest = {name: item for name, item in data.items() if name not in ("kind", "version", "choices", "plan")}
            report, considered, metric = rest.pop("report"), rest.pop("considered"), rest.pop("metric", None)
            start = read_record(Start, rest.pop("start", {}))
            leaving_out = tuple(map(str, rest.pop("leaving_out", ())))
            tiles = {str(name): int(number) for name, number in rest.pop("tiles", {}).items()}
            return cls(
                choices=Choices.from_dict(data["choices"]),
                plan=Plan.from_json(json.dumps(data["plan"])),
                report=read_record(Report, report),
                considered=tuple(read_record(Considered, row) for row in considered),
                metric=read_record(MetricChange, metric) if metric is not None else None,
                leaving_out=leaving_out,
                tiles=tiles,
                start=start,
                **asdict(read_record(_Numbers, rest)),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise damaged("budget fit", error, "Choose again.") from error


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
