"""Reports on a run's memory: peaks measured and predicted, events, the plan in words and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ctdr_lightning.basics.units import GIB
from ctdr_lightning.memory import Plan, simulate
from ctdr_lightning.memory.guide.events import OverBudget
from ctdr_lightning.memory.simulator.transfers import Transfers
from ctdr_lightning.trainer.reports.event_words import words_of
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.device import device_peaks
from ctdr_lightning.trainer.training_step.events import RecordedOverBudget
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage


@dataclass(frozen=True)
class PlanPeaks:
    """Predictions for a run's batches; 0 where nothing is planned.

    Attributes:
        predicted_bytes: The highest peak of a batch under its plan.
        unplanned_bytes: The highest peak of a batch without a plan.
        slowdown: Of the kind of step with that peak: seconds under its plan, in plain steps of the same model.
    """

    predicted_bytes: int = 0
    unplanned_bytes: int = 0
    slowdown: float = 0.0


class MemoryReport:
    """Reads the numbers and texts off a run's memory stage.

    Args:
        memory: Plans the steps.
    """

    def __init__(self, memory: MemoryStage) -> None:
        self._memory = memory
        self._logged_events = 0

    def peaks(self, trainer: Any, measured: BatchMeter | None) -> dict[str, float]:
        """The true peak of the last interval, in GiB: from the allocator on a GPU, from counted storages elsewhere.

        Args:
            trainer: In training.
            measured: The last batch that was measured; None where none was.
        """
        device = trainer.strategy.root_device
        if device.type == "cuda":
            return device_peaks(device)
        return {"ctdr/peak_memory_gib": measured.peak_bytes / GIB} if measured is not None else {}

    def predicted(self) -> dict[str, float]:
        """Predictions of the last plan; the same names on every rank, because their loggers wait for each other."""
        if self._memory.session is None:
            return {}
        shown = self._memory.last_plan
        peak_bytes, recompute_s = (shown.peak_bytes, shown.recompute_seconds) if shown is not None else (0, 0.0)
        found = {
            "ctdr/predicted_peak_gib": max(peak_bytes, self._memory.rest_peak_bytes) / GIB,
            "ctdr/recompute_s": recompute_s,
        }
        if self._memory.most_pinned_bytes is not None:
            found["ctdr/pinned_gib"] = self._memory.most_pinned_bytes / GIB
        return found | self._transfers(shown) if self._memory.offloads else found

    def plan_peaks(self) -> PlanPeaks:
        """The largest peaks of the run's kinds of steps, predicted with and without their plans.

        Under a budget a smaller batch, as the last of an epoch, often peaks as high as the others: it keeps more.
        """
        plans = self._memory.session.plans if self._memory.session is not None else ()
        if not plans:
            return PlanPeaks()
        rest_bytes = self._memory.rest_peak_bytes
        plain = [simulate(plan.trace).peak_bytes for plan in plans]
        unplanned_bytes, largest = max(zip(plain, plans, strict=True), key=lambda found: found[0])
        predicted_bytes = max(plan.peak_bytes for plan in plans)
        return PlanPeaks(max(rest_bytes, predicted_bytes), max(rest_bytes, unplanned_bytes), largest.slowdown)

    def over_budget_bytes(self) -> int:
        """The most by which a step of the run was seen to exceed the budget."""
        session, budget = self._memory.session, self._memory.budget_bytes
        if session is None or budget is None:
            return 0
        recorded = [event.n_bytes for event in session.events if isinstance(event, OverBudget)]
        whole = [event.n_bytes - budget for event in session.events if isinstance(event, RecordedOverBudget)]
        return max([0, *recorded, *whole])

    @staticmethod
    def _transfers(shown: Plan | None) -> dict[str, float]:
        """Predicted transfers of the last plan: bytes that leave the device in a step, and the waits for them."""
        transfers = shown.timeline.transfers if shown is not None else Transfers()
        return {"ctdr/moved_gib": transfers.moved_bytes / GIB, "ctdr/transfer_wait_s": transfers.waits_s}

    def new_events(self) -> list[str]:
        """Events of the session since the last call, in words."""
        events = self._memory.session.events if self._memory.session is not None else []
        new, self._logged_events = events[self._logged_events :], len(events)
        return [words_of(event) for event in new]

    def explain(self) -> list[str]:
        """The last plan in words: a line in brief, then one a decision."""
        found = self._memory.session.plan if self._memory.session is not None else None
        return [found.in_brief, *found.explain().splitlines()[1:]] if found is not None else ["No plan yet."]

    def picture(self) -> Any:
        """Memory over the planned step and the plain one, a matplotlib figure; None without matplotlib or a plan."""
        session = self._memory.session
        if session is None or session.plan is None or find_spec("matplotlib") is None:
            return None
        from matplotlib.figure import Figure

        # TensorBoard shows pictures 350 pixels wide and leaves out pixels: a wider one would lose its lines.
        figure = Figure(figsize=(5.6, 3), dpi=160, layout="constrained")
        axes = simulate(session.plan.trace).plot(figure.subplots(), label="everything kept")
        axes.lines[0].set(color="0.7", linewidth=3)  # seen behind a plan that drops nothing, too
        session.plan.timeline.plot(axes, label=f"plan ({session.plan.policy})")
        return figure
