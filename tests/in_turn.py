"""Marks for the rest of a long table: its rows take turns, so that each suite has some of every part."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest


def in_turn(rows: Iterable[Any], *marks: pytest.MarkDecorator | tuple[()]) -> list[Any]:
    """Parameters of a test, the first with the first mark, the second with the second, and so on round."""
    return [pytest.param(row, marks=mark) for row, mark in zip(rows, cycle(marks), strict=False)]
