"""Runs on disk: written next to a logger's files, found again in the folder of a run or of a sweep."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.memory import Plan
from ctdr_lightning.pages.run_page import RunParts, run_page
from ctdr_lightning.pages.run_record import RunRecord, finite

RECORD, PLAN, PAGE = "run.json", "plan.json", "report.html"
OWN_FOLDER = "ctdr"
# Folders that loggers make within a run's own.
_OF_LOGGERS = ("csv", "tensorboard", "lightning_logs", "csv_logs", "tb_logs")


def write_run(folder: Path, parts: RunParts) -> Path:
    """Write a run's record, plan and page.

    Args:
        folder: Of a logger; they go into ``ctdr/`` within it.
        parts: The run.

    Returns:
        The page.
    """
    own = folder / OWN_FOLDER
    parts.record.to_json(own / RECORD)
    if parts.plan is not None:
        parts.plan.to_json(own / PLAN)
    write_text(own / PAGE, run_page(parts))
    return own / PAGE


def read_runs(folder: Path) -> list[RunParts]:
    """Every run in a folder, by name.

    A run that was resumed has several records: the newest counts, with the history of those before it. A run without
    the callback has none; its ``metrics.csv`` is read.

    Raises:
        CheckpointError: If it holds no run, or a damaged one.
    """
    found: dict[Path, list[Path]] = {}
    for path in [*folder.rglob(f"{OWN_FOLDER}/{RECORD}"), *folder.rglob("metrics.csv")]:
        found.setdefault(_run_of(path), []).append(path)
    if not found:
        raise CheckpointError(
            f"{str(folder)!r} holds no run: no {OWN_FOLDER}/{RECORD} and no metrics.csv.",
            "Name the folder that a run's logger wrote to, or one above it.",
        )
    return [_read(home, paths, folder) for home, paths in sorted(found.items())]


def _run_of(path: Path) -> Path:
    """The folder of the run that a logger's file belongs to."""
    home = path.parent.parent if path.name == RECORD else path.parent
    while home.name.startswith("version_") or home.name in _OF_LOGGERS:
        home = home.parent
    return home


def _read(home: Path, paths: list[Path], within: Path) -> RunParts:
    name = str(home.relative_to(within)) if home != within and home.is_relative_to(within) else home.resolve().name
    records = sorted((p for p in paths if p.name == RECORD), key=lambda p: p.stat().st_mtime_ns)
    tables = sorted((p for p in paths if p.name == "metrics.csv"), key=lambda p: p.stat().st_mtime_ns)
    if not records:
        return RunParts(RunRecord(name, history=tuple(row for path in tables for row in _rows(path))))
    read = [RunRecord.from_json(path) for path in records]
    newest, plan = read[-1], records[-1].with_name(PLAN)
    history = {(e.get("step"), *sorted(e)): e for record in read for e in record.history}
    tested = [row for row in (_rows(tables[-1]) if tables else ()) if any(n.startswith("test") for n in row)]
    record = replace(newest, name=name, history=(*history.values(), *tested))
    return RunParts(record, Plan.from_json(plan) if plan.exists() else None)


def _rows(path: Path) -> Iterator[dict[str, float]]:
    """The rows of a CSV logger's file, each with its numbers."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                yield finite({name: float(value) for name, value in row.items() if name and value})
            except ValueError as error:
                raise CheckpointError(f"{str(path)!r} holds no numbers: {error}.", "Is it a CSVLogger's?") from error
