"""Records as a table of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def csv_of(kind: type[DataclassInstance], records: Sequence[DataclassInstance]) -> str:
    """The records' fields, a line each, below a line of the fields' names.

    Args:
        kind: The dataclass that names the columns.
        records: Instances of it.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(record) for record in records)
    return text.getvalue()
