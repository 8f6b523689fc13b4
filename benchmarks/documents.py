"""Writes the tables of the documents from committed JSON, and the notebook from its page: nothing is typed twice.

    python -m benchmarks.documents          # write them
    python -m benchmarks.documents --check  # exit 1 where a document differs from its data

A block lies between ``<!-- from docs/data/NAME.json: PART -->`` and ``<!-- end -->``; ``PARTS`` names the maker of each
part of the data. The demo, the evaluation and the benchmarks write such JSON under ``outputs/``: a copy of it in
``docs/data/`` and one run of this are all that new figures need.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.__main__ import TABLES
from ctdr_recipes import demo
from ctdr_recipes.evaluation.tables import PARTS as EVALUATION
from ctdr_recipes.evaluation.tables import Evaluation

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"(<!-- from (?P<data>\S+): (?P<part>\w+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)
PARTS: dict[str, Callable[[str, str], str]] = {
    "demo": lambda text, _: _demo(text),
    "evaluation": lambda text, part: EVALUATION[part](Evaluation.from_json(text)),
    **{name: import_module(f"benchmarks.{name}").BENCHMARK.table for name in TABLES},
}


def _demo(text: str) -> str:
    """The demo's table, its day and its versions."""
    told = json.loads(text)
    shown = demo.table(demo.from_json(text))
    return f"```text\n{shown}\n```\n\nMeasured on {told['day']}, one thread, the three in turns; {told['versions']}.\n"


def filled(document: str, root: Path = ROOT) -> str:
    """A document with every block made anew from its data."""

    def block(match: re.Match[str]) -> str:
        path = root / match["data"]
        made = PARTS[path.stem.partition("-")[0]]
        return f"{match[1]}\n{made(path.read_text(), match['part'])}\n{match[5]}"

    return _BLOCK.sub(block, document)


def notebook_of(page: str) -> str:
    """A page as a notebook: its Python blocks are the cells of code, the rest is text."""
    cells: list[dict[str, Any]] = []
    for index, part in enumerate(re.split(r"```python\n(.*?)```\n?", page, flags=re.DOTALL)):
        lines = part.strip("\n").splitlines(keepends=True)
        kind = {"cell_type": "code", "execution_count": None, "outputs": []} if index % 2 else {"cell_type": "markdown"}
        cells.append({**kind, "id": f"cell-{index}", "metadata": {}, "source": lines})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


def wanted(root: Path = ROOT) -> dict[Path, str]:
    """The text that each document should have."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    found = {path: filled(path.read_text(), root) for path in pages}
    quickstart = root / "docs" / "quickstart.md"
    return found | {quickstart.with_suffix(".ipynb"): notebook_of(quickstart.read_text())}


def drifted(root: Path = ROOT, *, write: bool = False) -> list[str]:
    """The documents that differ from their data; with ``write`` they are written."""
    found = {path: text for path, text in wanted(root).items() if not path.exists() or path.read_text() != text}
    for path, text in found.items() if write else ():
        path.write_text(text)
    return [str(path.relative_to(root)) for path in found]


def main() -> int:
    """Write the documents, or compare them."""
    parser = argparse.ArgumentParser(description="Tables of the documents from committed JSON.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    found = drifted(write=not check)
    print("\n".join(found) or "nothing to write")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
