"""The page that compares runs: a table, accuracy against memory, and their curves on one axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from ctdr_lightning.basics.units import GIB, format_bytes, format_seconds
from ctdr_lightning.pages.charts import Axis, Curve, Dot, line_chart, scatter
from ctdr_lightning.pages.markup import Amount, Markup, anchor, element, filled_columns, table
from ctdr_lightning.pages.memory_section import MEMORY, TIME, curve_of
from ctdr_lightning.pages.page import page, section
from ctdr_lightning.pages.run_page import RunParts, predicted_peak_bytes

_MOST_CURVES = 8  # as many as there are colours
_LONG_NAME = 40
# Where an override begins in the folder's name that Hydra makes of them: "ctdr.rank-0.5-experiment-digits".
_KEY = re.compile(r"(?:^|-)(?=\+*[A-Za-z])")


def comparison_page(title: str, runs: Sequence[RunParts]) -> str:
    """Several runs as one HTML document."""
    runs = _shortly_named(runs)
    head, rows = comparison_rows(runs)
    ids = [anchor(parts.record.name) for parts in runs]
    sections = [section("Runs", table(head, rows, ids=ids)), *_pictures(runs)]
    return page(title, f"{len(runs)} runs. A click on a column's name sorts by it.", sections)


def comparison_rows(runs: Sequence[RunParts]) -> tuple[list[str], list[list[object]]]:
    """The table: settings that differ, then numbers; columns that no run fills are left out."""
    settings = sorted({name for parts in runs for name in parts.record.settings})
    differing = [n for n in settings if len({parts.record.settings.get(n) for parts in runs}) > 1]
    scores = list(dict.fromkeys(n for parts in runs for n in parts.record.metrics if _is_score(n)))
    head = ["run", *differing, "parameters", *scores, "peak predicted", "peak measured", "time of a batch", "samples/s"]
    return filled_columns(head, [_row(parts, differing, scores) for parts in runs])


def comparison_text(runs: Sequence[RunParts]) -> str:
    """The table as Markdown."""
    head, rows = comparison_rows(_shortly_named(runs))
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "/") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shortly_named(runs: Sequence[RunParts]) -> Sequence[RunParts]:
    """The same runs; of long names the overrides that all share at the beginning and at the end are left out."""
    names = [parts.record.name for parts in runs]
    if len(set(names)) < 2 or max(map(len, names)) <= _LONG_NAME:
        return runs
    begin, end = _n_shared(names), len(names[0]) - _n_shared([name[::-1] for name in names])
    first = max((m.end() for m in _KEY.finditer(names[0]) if m.end() <= begin), default=0)
    last = min((m.start() for m in _KEY.finditer(names[0]) if m.start() >= end), default=len(names[0]))
    short = [name[first : len(name) - (len(names[0]) - last)] for name in names]
    if len(set(short)) < len(set(names)):
        return runs
    return [replace(parts, record=replace(parts.record, name=name)) for parts, name in zip(runs, short, strict=True)]


def _n_shared(names: Sequence[str]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False)))


def _is_score(name: str) -> bool:
    """Whether a metric is one of an evaluation: a loss over training batches says little of a run."""
    return not name.startswith("train") and not name.endswith("_step")


def _row(parts: RunParts, settings: Sequence[str], scores: Sequence[str]) -> list[object]:
    record = parts.record
    given = [record.settings.get(name, "") for name in settings]
    found = [record.last(name) for name in scores]
    measured, taken = record.highest("ctdr/peak_memory_gib"), record.typical("ctdr/step_time_s")
    speed, predicted = record.typical("ctdr/samples_per_s"), predicted_peak_bytes(parts)
    return [
        record.name, *given,
        Amount(record.parameters_after, f"{record.parameters_after:,}") if record.parameters_after else "",
        *(Amount(value, f"{value:.4f}") if value is not None else "" for value in found),
        Amount(predicted, format_bytes(predicted)) if predicted else "",
        Amount(measured, format_bytes(measured * GIB)) if measured else "",
        Amount(taken, format_seconds(taken)) if taken else "",
        Amount(speed, f"{speed:,.0f}") if speed else "",
    ]  # fmt: skip


def peak_of(parts: RunParts) -> float:
    """The measured peak in bytes; the predicted one where none was measured, 0 where neither is known."""
    measured = parts.record.highest("ctdr/peak_memory_gib")
    return measured * GIB if measured else predicted_peak_bytes(parts)


def accuracy_of(runs: Sequence[RunParts]) -> str | None:
    """The metric to compare by: the first accuracy that every run has; None if there is none."""
    shared = [n for n in runs[0].record.metrics if all(n in parts.record.metrics for parts in runs)] if runs else []
    order = sorted((n for n in shared if "acc" in n), key=lambda n: (not n.startswith("test"), not n.startswith("val")))
    return order[0] if order else None


def _pictures(runs: Sequence[RunParts]) -> Iterator[Markup]:
    name = accuracy_of(runs)
    placed = [p for p in runs if peak_of(p) and name is not None and p.record.last(name) is not None]
    if name is not None and placed:
        dots = [
            Dot(p.record.name, peak_of(p), p.record.last(name) or 0.0, index + 1, anchor(p.record.name))
            for index, p in enumerate(placed)
        ]
        axis = Axis(name, lambda v: f"{v:.4g}", from_zero=False)
        yield section(f"{name} and the peak of a step", scatter(dots, MEMORY, axis, what=f"{name} against the peak"))
    planned = [(p.record.name, p.plan.timeline) for p in runs if p.plan is not None][:_MOST_CURVES]
    if planned:
        curves = [curve_of(label, line, index + 1) for index, (label, line) in enumerate(planned)]
        note = element("p", "Predicted.", class_="note")
        yield section("Memory over the step", note, line_chart(curves, TIME, MEMORY, what="Live memory of each run"))
    if name is not None:
        curves = [Curve(p.record.name, *p.record.series(name), colour=i + 1) for i, p in enumerate(runs[:_MOST_CURVES])]
        epoch = Axis("epoch", lambda v: f"{v:g}", from_zero=False, whole=True)
        axis = Axis(name, lambda v: f"{v:.4g}", from_zero=False)
        yield section(f"{name} over the epochs", line_chart(curves, epoch, axis, what=f"{name} of each run"))
