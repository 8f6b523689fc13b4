"""Rows of cells as lines of text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text with cells in columns, two blanks apart.

    Args:
        rows: Cells; all rows have as many.

    Example:
        >>> aligned([("name", "bytes"), ("net.stem", "12")])
        ['name      bytes', 'net.stem  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
