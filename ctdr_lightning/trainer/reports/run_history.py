"""A run's settings, its output and its numbers over time, kept for the page at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctdr_lightning.decomposition import Report
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.memory import Plan, simulate
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.pages.run_page import RunParts
from ctdr_lightning.pages.run_record import RunRecord, finite, layer_rows

# A long run with one entry a log point would make the page too long: beyond this many every second entry goes.
_MOST_ENTRIES = 4000


class RunHistory:
    """Collects while a run goes on.

    Args:
        settings: The callback's arguments as primitives.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = {name: str(value) for name, value in settings.items() if value is not None}
        self._entries: list[dict[str, float]] = []
        self._events: list[str] = []

    def note(self, trainer: Any, values: Mapping[str, Any]) -> None:
        """Keep the numbers of a log point, or of a validation."""
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        self._entries.append(finite({**place, **values}))
        if len(self._entries) > _MOST_ENTRIES:
            self._entries = [*self._entries[:-1:2], self._entries[-1]]

    def said(self, event: str) -> None:
        """Keep a sentence."""
        self._events.append(event)

    def parts(
        self, name: str, report: Report | None, plan: Plan | None, fit: BudgetFit | None, **sizes: int
    ) -> RunParts:
        """The run in the form of a page.

        Args:
            name: Of the run.
            report: The decomposition; None without one.
            plan: The memory plan; None if there is none.
            fit: The choice of ranks for a budget; None without one.
            sizes: ``parameters_before`` and ``parameters_after`` of the record.
        """
        record = RunRecord(
            name=name,
            settings=self._settings,
            **sizes,
            layers=layer_rows(report),
            history=tuple(self._entries),
            events=tuple(self._events),
            options=fit.options if fit is not None else (),
            dense_peak_bytes=fit.dense_peak_bytes if fit is not None else 0,
        )
        return RunParts(record, plan, _dense_timeline(fit))


def _dense_timeline(fit: BudgetFit | None) -> Timeline | None:
    """The dense step beside the plan's; None where the choice left all layers dense, whose step the plan's own is."""
    if fit is None or fit.is_dense or fit.dense_step is None:
        return None
    return simulate(fit.dense_step)
