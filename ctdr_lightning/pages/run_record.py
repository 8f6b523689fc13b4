"""One run as plain data: decisions, predictions, measurements, and the numbers over time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, isnan
from pathlib import Path

from ctdr_lightning.basics.documents import parse_document, plain_of, read_record
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.decomposition import LayerReport, Report
from ctdr_lightning.joint.considered import Option

RUN_VERSION = 2


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        name: Name of the run.
        settings: The user's settings, as text by name.
        parameters_before: Of the dense model; 0 where it is not known.
        parameters_after: Of the model that was trained.
        dense_peak_bytes: Predicted peak of the dense step; 0 where it is not known.
        layers: One row a layer.
        history: One entry a log point: ``epoch``, ``step``, and numbers by name.
        events: Events and warnings, as sentences in order.
        options: The ways to train under the budget that were looked at; none where none were.

    Example:
        >>> RunRecord.from_json(RunRecord("mine").to_json()) == RunRecord("mine")
        True
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0
    dense_peak_bytes: int = 0
    layers: tuple[LayerReport, ...] = ()
    history: tuple[Mapping[str, float], ...] = ()
    events: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()

    def series(self, name: str, over: str = "epoch") -> tuple[list[float], list[float]]:
        """The values of a number over epochs or steps; the last one where several fall together."""
        found = {entry[over]: entry[name] for entry in self.history if name in entry and over in entry}
        return sorted(found), [found[key] for key in sorted(found)]

    def last(self, name: str) -> float | None:
        """The last value of a number; None if there is none."""
        return next((entry[name] for entry in reversed(self.history) if name in entry), None)

    def highest(self, name: str) -> float | None:
        """The largest value of a number: the last batch of an epoch is often smaller than the others."""
        return max((entry[name] for entry in self.history if name in entry), default=None)

    def typical(self, name: str) -> float | None:
        """The median of a number's values."""
        values = sorted(entry[name] for entry in self.history if name in entry)
        return values[len(values) // 2] if values else None

    @property
    def metrics(self) -> list[str]:
        """Names of the numbers of the history that are not ours, in the order in which they first come."""
        names = dict.fromkeys(name for entry in self.history for name in entry)
        return [name for name in names if name not in ("epoch", "step") and not name.startswith("ctdr/")]

    def to_json(self, path: str | Path | None = None) -> str:
        """Write it as versioned JSON; returns the text.

        Args:
            path: File to write; it is complete or absent, never half-written.
        """
        plain = {"kind": "run", "version": RUN_VERSION}
        plain |= {f.name: plain_of(getattr(self, f.name)) for f in fields(self)}
        plain |= {"settings": dict(self.settings), "history": [dict(entry) for entry in self.history]}
        text = json.dumps(plain, indent=1) + "\n"
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> RunRecord:
        """Read the output of ``to_json``.

        Raises:
            CheckpointError: If the text is not such a record of this version.
        """
        data = parse_document(source, "run", RUN_VERSION)
        try:
            return cls(
                name=str(data["name"]),
                settings={str(name): str(value) for name, value in data["settings"].items()},
                parameters_before=int(data["parameters_before"]),
                parameters_after=int(data["parameters_after"]),
                dense_peak_bytes=int(data["dense_peak_bytes"]),
                layers=tuple(read_record(LayerReport, row) for row in data["layers"]),
                history=tuple(finite(entry) for entry in data["history"]),
                events=tuple(map(str, data["events"])),
                options=tuple(read_record(Option, row) for row in data["options"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"This run's record is damaged: {error!r}.", "Run it again.") from error


def layer_rows(report: Report | None) -> tuple[LayerReport, ...]:
    """A report's rows as a record keeps them: JSON has no NaN. Nothing where nothing was decomposed."""
    return tuple(replace(row, relative_error=0.0) if isnan(row.relative_error) else row for row in report or ())


def finite(entry: Mapping[str, float]) -> dict[str, float]:
    """The entries that are finite numbers: JSON has no others.

    Example:
        >>> finite({"loss": float("nan"), "step": 3})
        {'step': 3.0}
    """
    return {str(name): float(value) for name, value in entry.items() if isfinite(float(value))}
