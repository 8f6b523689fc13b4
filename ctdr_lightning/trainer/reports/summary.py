"""The closing summary of a run: size, accuracy over time, peak, verdict on the budget, step time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ctdr_lightning.basics.units import GIB, format_bytes, format_seconds
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.recovery.decisions import Progress
from ctdr_lightning.trainer.reports.memory_report import PlanPeaks

# As many as fit one line of a terminal.
_MOST_METRICS = 6
# Of Lightning's LearningRateMonitor, "lr-Adam/pg1", and of those who log it by hand.
_LEARNING_RATE = re.compile(r"(lr|learning_rate)\b", re.IGNORECASE)


@dataclass(frozen=True)
class RunFacts:
    """Facts at the end of training.

    Attributes:
        parameters_before: Of the dense model.
        parameters_after: Of the present model.
        monitor: Name of the metric that recovery goes by; empty without recovery.
        progress: Progress of the recovery; None without recovery.
        metrics: The last validation's metrics by name.
        peaks: Predictions of the memory plans.
        budget_bytes: The budget; None without one.
        over_bytes: The most by which a step was seen to exceed the budget, apart from the measured peak.
        measured: The last log interval's numbers, by their names in the loggers; the peak is the highest of any.
        counted: Whether the measured bytes are those of counted tensors, rather than those of a GPU's allocator.
        fit: The choice of ``rank="auto"``; None elsewhere.
    """

    parameters_before: int
    parameters_after: int
    monitor: str = ""
    progress: Progress | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    peaks: PlanPeaks = field(default_factory=PlanPeaks)
    budget_bytes: int | None = None
    over_bytes: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)
    counted: bool = False
    fit: BudgetFit | None = None


def closing_summary(facts: RunFacts) -> str:
    """The summary as lines; unknown facts are left out."""
    lines = [_size(facts)]
    lines += [text for text in (_accuracy(facts), _peak(facts), _kept(facts), _time(facts), _chosen(facts)) if text]
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
    metrics = [(name, value) for name, value in facts.metrics.items() if not _LEARNING_RATE.match(name)]
    shown = [f"{name} {value:.4f}" for name, value in metrics[:_MOST_METRICS]]
    return f"Last metrics: {', '.join(shown)}." if shown else ""


def _peak(facts: RunFacts) -> str:
    peaks, measured = facts.peaks, _measured_peak_bytes(facts)
    told = [f"dense {format_bytes(facts.fit.dense_peak_bytes)}"] if facts.fit is not None else []
    told += [f"{format_bytes(peaks.unplanned_bytes)} without a plan"] if peaks.unplanned_bytes else []
    told += [f"{format_bytes(peaks.predicted_bytes)} predicted"] if peaks.predicted_bytes else []
    # what kernels allocate for themselves is predicted, but no processor tells it while they run
    told += [f"{format_bytes(measured)} {'of tensors ' if facts.counted else ''}measured"] if measured else []
    first = measured and peaks.predicted_bytes and facts.budget_bytes is None and not facts.counted
    told += ["the first step included, which ran without a plan"] if first else []
    return f"Peak of a step: {', '.join(told)}." if told else ""


def _measured_peak_bytes(facts: RunFacts) -> int:
    return round(facts.measured.get("ctdr/peak_memory_gib", 0.0) * GIB)


def _kept(facts: RunFacts) -> str:
    """Verdict on the budget: by measured bytes, and by predicted ones where only tensors could be counted."""
    if facts.budget_bytes is None:
        return ""
    measured, budget = _measured_peak_bytes(facts), format_bytes(facts.budget_bytes)
    known = max(measured, facts.peaks.predicted_bytes) if facts.counted else measured
    over = max(facts.over_bytes, known - facts.budget_bytes)
    if over > 0:
        unplanned = measured > 0 and known <= facts.budget_bytes
        when = " That batch ran without a plan; measured ones with a plan kept it." if unplanned else ""
        return f"Budget of {budget} kept: no, by {format_bytes(over)}.{when}"
    if not measured:
        return f"Budget of {budget} kept: not measured; Trainer(log_every_n_steps=) sets how often steps are."
    return f"Budget of {budget} kept: yes."


def _time(facts: RunFacts) -> str:
    taken = facts.measured.get("ctdr/step_time_s", 0.0)
    speed = facts.measured.get("ctdr/samples_per_s", 0.0)
    if not taken:
        return ""
    relative = f"; x{facts.peaks.slowdown:.2f} of the plain step's time, predicted" if facts.peaks.slowdown else ""
    time = f"{format_seconds(taken)}, {speed:,.0f} samples/s{relative}"
    return f"Time of a batch, with its loading and the optimizer: {time}."


def _chosen(facts: RunFacts) -> str:
    """Measurements of the choice of ranks, made before training."""
    fit = facts.fit
    if fit is None:
        return ""
    told = [f"x{fit.measured_slowdown:.2f} of the dense step's time"] if fit.measured_slowdown else []
    told += [] if fit.is_dense else [f"a KL of {fit.loss:.4f} nats"]
    told += [str(fit.metric)] if fit.metric is not None else []
    return f"Measured before training: {'; '.join(told)}." if told else ""
