"""The closing account of a run: accuracy on its way, size, peak, step time, and what the budget bought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ctdr_lightning.basics.units import GIB, format_bytes, format_seconds
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.recovery.decisions import Progress

# As many as stand in one line of a terminal.
_MOST_METRICS = 6


@dataclass(frozen=True)
class RunFacts:
    """What is known when training ends.

    Attributes:
        parameters_before: Of the dense model.
        parameters_after: Of the model as it is.
        monitor: Name of the metric that recovery goes by; empty without recovery.
        progress: Where recovery stands; None without recovery.
        metrics: The last validation's metrics by name.
        predicted_peak_bytes: Largest peak that the memory plans predict; 0 where nothing is planned.
        measured: The last log interval's numbers, by their names in the loggers; the peak is the highest of any.
        fit: What ``rank="auto"`` chose; None elsewhere.
    """

    parameters_before: int
    parameters_after: int
    monitor: str = ""
    progress: Progress | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    predicted_peak_bytes: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)
    fit: BudgetFit | None = None


def closing_summary(facts: RunFacts) -> str:
    """The account, a line each; what is not known is left out."""
    lines = [_size(facts)]
    lines += [text for text in (_accuracy(facts), _peak(facts), _time(facts), _bought(facts)) if text]
    return "\n".join(lines)


def _size(facts: RunFacts) -> str:
    before, after = facts.parameters_before, facts.parameters_after
    if before == after:
        return f"Parameters: {after:,}, as many as before."
    return f"Parameters: {before:,} -> {after:,}, {before / max(after, 1):.2f} times fewer."


def _accuracy(facts: RunFacts) -> str:
    progress = facts.progress
    stages = {}
    if progress is not None:
        stages = {
            "dense": progress.reference,
            "raw": progress.raw,
            "after re-estimation": progress.batchnorm,
            "now": progress.metric,
        }
    known = [f"{name} {value:.4f}" for name, value in stages.items() if value is not None]
    if known:
        return f"{facts.monitor or 'Metric'}: {', '.join(known)}."
    shown = [f"{name} {value:.4f}" for name, value in list(facts.metrics.items())[:_MOST_METRICS]]
    return f"Last metrics: {', '.join(shown)}." if shown else ""


def _peak(facts: RunFacts) -> str:
    measured = facts.measured.get("ctdr/peak_memory_gib", 0.0) * GIB
    told = [f"{format_bytes(facts.predicted_peak_bytes)} predicted"] if facts.predicted_peak_bytes else []
    told += [f"{format_bytes(measured)} measured"] if measured else []
    return f"Peak of a step: {', '.join(told)}." if told else ""


def _time(facts: RunFacts) -> str:
    taken = facts.measured.get("ctdr/step_time_s", 0.0)
    speed = facts.measured.get("ctdr/samples_per_s", 0.0)
    return f"Time of a batch: {format_seconds(taken)}, {speed:,.0f} samples/s." if taken else ""


def _bought(facts: RunFacts) -> str:
    fit = facts.fit
    if fit is None:
        return ""
    share = fit.peak_bytes / max(fit.dense_peak_bytes, 1)
    model = (
        "the dense model" if fit.is_dense else f"{fit.parameters_before / fit.parameters_after:.1f}x fewer parameters"
    )
    paid = f"{fit.measured_slowdown:.2f} of the dense step's time, " if fit.measured_slowdown else ""
    asked = f"The budget of {format_bytes(fit.budget_bytes)}" if fit.budget_bytes else "The choice of ranks and plan"
    metric = f"\nBefore training: {fit.metric}." if fit.metric is not None else ""
    bought = f"{asked} bought a step at {share:.0%} of the dense peak for {paid}{model} and a KL of {fit.loss:.4f}."
    return bought + metric
