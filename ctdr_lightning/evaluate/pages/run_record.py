"""One run as plain data: what was decided, what it predicted, what was measured, and the numbers over time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite, isnan
from pathlib import Path

from ctdr_lightning.basics.documents import parse_document, plain_of, read_record
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.decomposition import Report

RUN_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerLine:
    """What became of one layer.

    Attributes:
        name: Dotted name in the model.
        kind: Class of the dense layer.
        method: Method; empty where it stays dense.
        ranks: Its ranks, input side first.
        parameters_before: Weights and bias of the dense layer.
        parameters_after: Weights and bias now.
        error: Relative error of the weight.
        reason: Why.
    """

    name: str
    kind: str
    method: str
    ranks: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    error: float
    reason: str


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        name: What it is called.
        settings: What was asked for, as text by name.
        parameters_before: Of the dense model; 0 where it is not known.
        parameters_after: Of the model that was trained.
        dense_peak_bytes: Predicted peak of the dense step; 0 where it is not known.
        layers: One line a layer.
        history: One entry a log point: ``epoch``, ``step``, and numbers by name.
        events: What happened, and what was warned of, in words and in order.

    Example:
        >>> RunRecord.from_json(RunRecord("mine").to_json()) == RunRecord("mine")
        True
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0
    dense_peak_bytes: int = 0
    layers: tuple[LayerLine, ...] = ()
    history: tuple[Mapping[str, float], ...] = ()
    events: tuple[str, ...] = ()

    def series(self, name: str, over: str = "epoch") -> tuple[list[float], list[float]]:
        """The values of a number over epochs or steps; the last one where several fall together."""
        found = {entry[over]: entry[name] for entry in self.history if name in entry and over in entry}
        return sorted(found), [found[key] for key in sorted(found)]

    def last(self, name: str) -> float | None:
        """The last value of a number; None where there is none."""
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
        """Read what ``to_json`` wrote.

        Raises:
            CheckpointError: When the text is no such record of this version.
        """
        data = parse_document(source, "run", RUN_VERSION)
        try:
            return cls(
                name=str(data["name"]),
                settings={str(name): str(value) for name, value in data["settings"].items()},
                parameters_before=int(data["parameters_before"]),
                parameters_after=int(data["parameters_after"]),
                dense_peak_bytes=int(data["dense_peak_bytes"]),
                layers=tuple(read_record(LayerLine, row) for row in data["layers"]),
                history=tuple(finite(entry) for entry in data["history"]),
                events=tuple(map(str, data["events"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"This run's record is damaged: {error!r}.", "Run it again.") from error


def layer_lines(report: Report | None) -> tuple[LayerLine, ...]:
    """What a decomposition made of each layer; nothing where there was none."""
    return tuple(
        LayerLine(
            row.name, row.kind, row.method or "", tuple(map(int, row.ranks)), row.parameters_before,
            row.parameters_after, 0.0 if isnan(row.relative_error) else row.relative_error, row.reason,
        )
        for row in report or ()
    )  # fmt: skip


def finite(entry: Mapping[str, float]) -> dict[str, float]:
    """The entries that are finite numbers: JSON has no others.

    Example:
        >>> finite({"loss": float("nan"), "step": 3})
        {'step': 3.0}
    """
    return {str(name): float(value) for name, value in entry.items() if isfinite(float(value))}
