"""The table that opens a run: its decomposition, in 100 columns. The whole report goes to the loggers."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from ctdr_lightning.basics.columns import aligned
from ctdr_lightning.decomposition import Report
from ctdr_lightning.decomposition.report import LayerReport

WIDTH = 100
_LONGEST_NAME = 38
_HEAD = ("layer", "method", "ranks", "parameters", "kept", "error", "why")


def opening_table(report: Report) -> str:
    """A line for each factorized layer, one on those that stay dense, and the whole.

    Args:
        report: Of the decomposition.

    Returns:
        Text of at most 100 columns.
    """
    rows = [_cells(row) for row in report.factorized]
    before, after = report.parameters_before, report.parameters_after
    whole = ("whole model", "", "", f"{before:,} -> {after:,}", f"{after / max(before, 1):.1%}", "", "")
    lines = [clipped(line) for line in aligned([_HEAD, *rows, whole])]
    rule = "-" * max(map(len, lines))
    dense = [row for row in report if row.decision != "factorized"]
    stay = "layer stays" if len(dense) == 1 else "layers stay"
    notes = [f"{len(dense)} {stay} dense: {_reasons(dense)}"] if dense else []
    notes += [*report.notes(), *report.measured()]
    table = [lines[0], rule, *lines[1:-1], *([rule] if rows else []), lines[-1]]
    return "\n".join([*table, *map(wrapped, notes)])


def wrapped(text: str, width: int = WIDTH) -> str:
    """Text whose lines are broken between words where they are too long for a console.

    Example:
        >>> print(wrapped("two short lines", 9))
        two short
        lines
    """
    lines = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    return "\n".join("\n".join(line) for line in lines)


def clipped(text: str, width: int = WIDTH) -> str:
    """Text whose lines are cut where they are too long for a console.

    Example:
        >>> clipped("a long line", 8)
        'a long …'
    """
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in text.splitlines())


def _cells(row: LayerReport) -> tuple[str, ...]:
    name = row.name if len(row.name) <= _LONGEST_NAME else f"…{row.name[1 - _LONGEST_NAME :]}"
    error = "" if row.relative_error != row.relative_error else f"{row.relative_error:.3f}"
    sizes = f"{row.parameters_before:,} -> {row.parameters_after:,}"
    kept = f"{row.parameters_after / max(row.parameters_before, 1):.1%}"
    return name, row.method or "", " x ".join(map(str, row.ranks)), sizes, kept, error, _shortly(row)


def _reasons(rows: Sequence[LayerReport]) -> str:
    """The reasons with how often each was given, the most frequent first, without their figures."""
    counts = Counter(map(_shortly, rows))
    return ", ".join(f"{reason} ({n})" if len(counts) > 1 else reason for reason, n in counts.most_common())


def _shortly(row: LayerReport) -> str:
    return row.reason.partition(",")[0].partition(":")[0].partition(" (")[0]
