"""``ctdr report``: HTML pages from a run's folder, a sweep's, or a plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ctdr_lightning.basics.files import write_text
from ctdr_lightning.decomposition import Report
from ctdr_lightning.memory import Plan
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.pages.comparison_page import comparison_page
from ctdr_lightning.pages.run_folder import read_runs
from ctdr_lightning.pages.run_page import RunParts, run_page
from ctdr_lightning.pages.run_record import RunRecord, layer_rows


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ctdr report``."""
    parser.add_argument("sources", nargs="+", help="folders of runs or of sweeps, or one plan file")
    parser.add_argument("-o", "--output", default="report.html", help="the page; report.html by default")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    paths = [Path(source) for source in options.sources]
    if len(paths) == 1 and paths[0].is_file():
        text = run_page(RunParts(RunRecord(paths[0].name), Plan.from_json(paths[0])))
        said = "a plan"
    else:
        runs = [parts for path in paths for parts in read_runs(path)]
        text = run_page(runs[0]) if len(runs) == 1 else comparison_page(_title(paths), runs)
        said = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    write_text(options.output, text)
    print(f"{options.output}: {said}, {len(text.encode()) / 2**10:,.0f} KiB")


def _title(paths: Sequence[Path]) -> str:
    return ", ".join(path.resolve().name for path in paths)


def write_plan_page(path: str, title: str, plan: Plan, report: Report | None, dense: Timeline | None) -> None:
    """Write the page on a plan that was made without training.

    Args:
        path: Of the page.
        title: Of the page.
        plan: The plan of the step.
        report: The decomposition; None without one.
        dense: The dense model's step; None without a decomposition.
    """
    before, after = (report.parameters_before, report.parameters_after) if report is not None else (0, 0)
    record = RunRecord(title, parameters_before=before, parameters_after=after, layers=layer_rows(report))
    write_text(path, run_page(RunParts(record, plan, dense)))
