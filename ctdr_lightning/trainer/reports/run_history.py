"""What a run was asked for, what it said and its numbers over time, kept for the page that is written at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctdr_lightning.decomposition import Report
from ctdr_lightning.evaluate.pages.run_page import RunParts
from ctdr_lightning.evaluate.pages.run_record import RunRecord, finite, layer_lines
from ctdr_lightning.memory import Plan

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

    def parts(self, name: str, report: Report | None, plan: Plan | None, **sizes: int) -> RunParts:
        """The run as it is told.

        Args:
            name: Of the run.
            report: What was decomposed; None where nothing was.
            plan: The memory plan; None where there is none.
            sizes: ``parameters_before``, ``parameters_after`` and ``dense_peak_bytes`` of the record.
        """
        record = RunRecord(
            name=name,
            settings=self._settings,
            **sizes,
            layers=layer_lines(report),
            history=tuple(self._entries),
            events=tuple(self._events),
        )
        return RunParts(record, plan)
