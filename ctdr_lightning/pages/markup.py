"""HTML and SVG as text, safe against its contents: everything but ``Markup`` is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True)
class Amount:
    """A number in a table, which sorts by its value and is written as its text."""

    value: float
    text: str

    def __str__(self) -> str:
        return self.text


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """One element.

    Args:
        tag: Its name.
        children: Texts, which are escaped, and elements, which are not; None is left out.
        attributes: By name, ``class_`` for ``class`` and ``_`` for ``-``; None and False are left out.

    Example:
        >>> element("p", "a < b", class_="note", data_n=3)
        '<p class="note" data-n="3">a &lt; b</p>'
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    words = [
        f'{name}="{escape(str(value))}"' for name, value in given.items() if value is not None and value is not False
    ]
    return Markup(f"<{' '.join([tag, *words])}>{joined(children)}</{tag}>")


def joined(children: Iterable[object]) -> Markup:
    """Texts and elements, one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else escape(str(c)) for c in children if c is not None))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, ids: Sequence[str] = ()) -> Markup:
    """A table. A click on a column's name sorts it, amounts by their values.

    Args:
        head: The columns' names.
        rows: Their cells.
        ids: An anchor for each row, where rows are pointed at.
    """
    lines, of_numbers = [], set[int]()
    for index, row in enumerate(rows):
        cells = [element("td", cell, **_look_of(cell)) for cell in row]
        lines.append(element("tr", *cells, id=ids[index] if ids else None))
        of_numbers |= {column for column, cell in enumerate(row) if _look_of(cell)}
    names = [element("th", name, scope="col", class_="n" if i in of_numbers else None) for i, name in enumerate(head)]
    columns = element("thead", element("tr", *names))
    return element("div", element("table", columns, element("tbody", *lines)), class_="scroll")


def filled_columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> tuple[list[str], list[list[object]]]:
    """A table without the columns that no row fills; the first one stays.

    Example:
        >>> filled_columns(["run", "rank", "loss"], [["a", "", 1.5], ["b", "", ""]])
        (['run', 'loss'], [['a', 1.5], ['b', '']])
    """
    kept = [i for i in range(len(head)) if i == 0 or any(str(row[i]) for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def anchor(name: str) -> str:
    """An id for a layer's row.

    Example:
        >>> anchor("net.layer1.0.conv1")
        'layer-net.layer1.0.conv1'
    """
    return f"layer-{name.replace(' ', '-') or 'step'}"


def foldable(name: str) -> Markup:
    """A class's name that a narrow column may break before each of its words.

    Example:
        >>> foldable("BatchNorm2d")
        'Batch<wbr>Norm2d'
    """
    return Markup(re.sub("(?<=[a-z])(?=[A-Z])", "<wbr>", escape(name)))


def _look_of(cell: object) -> dict[str, object]:
    if isinstance(cell, Amount):
        return {"class_": "n", "data_sort": repr(cell.value)}
    return {"class_": "n"} if isinstance(cell, int | float) else {}
