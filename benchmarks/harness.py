"""One harness for all benchmarks: options, JSON with day, machine and versions, and the Markdown made from it.

A benchmark is a function that yields rows, dataclasses. Its arguments are the command's options, keyword-only ones
with two dashes, and their defaults the settings of the documents' tables. ``python -m benchmarks.NAME`` prints each row
as it comes, keeps all in ``FOLDER/NAME.json``, and prints the tables; `benchmarks.documents` makes the same tables of a
committed copy of that file.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache, cached_property
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any

import torch

from ctdr_lightning.basics.files import write_text

_PACKAGES = ("ctdr-lightning", "torch", "lightning", "tensorly", "numpy", "scipy", "torchvision", "transformers")
# A line of cells, such as "{net} | {seconds:x.2f}", or a function that gives it; None shows nothing.
Line = str | Callable[[Any], str]


@cache
def machine() -> dict[str, Any]:
    """The processor, the system and the versions that figures depend on."""
    versions = {found.metadata["Name"]: found.version for found in distributions()}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        **gpu,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: versions[name] for name in _PACKAGES if name in versions},
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


@dataclass(frozen=True)
class Figures:
    """Measured rows with the day and the machine.

    Attributes:
        text: The JSON that a benchmark wrote.
        parts: The kind of the rows of each part.
    """

    text: str
    parts: Mapping[str, type]

    @cached_property
    def _found(self) -> dict[str, Any]:
        return json.loads(self.text)

    def rows(self, kind: type) -> list[Any]:
        """The rows of one kind."""
        part = next(part for part, of in self.parts.items() if of is kind)
        return [kind(**row) for row in self._found.get(part, [])]

    def run_on(self) -> str:
        """A sentence with day, processor and versions; predictions are run, too."""
        found, versions = self._found["machine"], self._found["machine"]["versions"]
        shown = ", ".join(f"{name} {versions[name]}" for name in _PACKAGES[:2] if name in versions)
        gpu = f"{found['gpu']}; " if "gpu" in found else ""
        return f"Run on {self._found['day']}: {gpu}{found['processor']}, {found['cores']} cores; {shown}."

    def markdown(self, head: str, lines: Sequence[str]) -> str:
        """A table of such lines and the sentence of its measurement; nothing where there is no line."""
        rule = " | ".join("---" for _ in head.split(" | "))
        table = "".join(f"| {line} |\n" for line in (head, rule, *lines))
        return f"{table}\n{self.run_on()}\n" if lines else ""


Table = Callable[[Figures], str]


class _Line(Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        factor = format_spec.startswith("x")
        return "x" * factor + format(value, format_spec[factor:])


def text_of(line: Line, row: Any) -> str:
    """Cells of a row."""
    return _Line().format(line, row) if isinstance(line, str) else line(row)


def table(kind: type, head: str, line: Line, where: Callable[[Any], object] = lambda row: True) -> Table:
    """A table with a line a row.

    Args:
        kind: Of its rows.
        head: Cells with `` | `` between them.
        line: The same of a row.
        where: Selects rows.
    """
    return lambda figures: figures.markdown(head, [text_of(line, row) for row in figures.rows(kind) if where(row)])


def pivot(
    kind: type,
    head: str,
    line: Line,
    column: str,
    cell: Line,
    *,
    by: str = "",
    right: tuple[str, Callable[[list[Any]], str]] | None = None,
    where: Callable[[Any], object] = lambda row: True,
) -> Table:
    """A table with a cell a row, in lines and columns.

    Args:
        kind: Of its rows.
        head: Cells on the left of those of the columns.
        line: The same of a line, from its first row.
        column: The head of a row's column.
        cell: Shown of a row.
        by: Common to the rows of a line; ``line`` where it is empty.
        right: Head and cells on the right, from the rows of a line.
        where: Selects rows.
    """

    def shown(figures: Figures) -> str:
        rows = [row for row in figures.rows(kind) if where(row)]
        columns = list(dict.fromkeys(text_of(column, row) for row in rows))
        lines = []
        for _, group in groupby(rows, lambda row: text_of(by or line, row)):
            of = list(group)
            by_column = {text_of(column, row): text_of(cell, row) for row in of}
            cells = [by_column.get(name, "") for name in columns]
            lines.append(" | ".join([text_of(line, of[0]), *cells, *([right[1](of)] if right else [])]))
        return figures.markdown(" | ".join([head, *columns, *([right[0]] if right else [])]), lines)

    return shown


def write_figures(path: Path, **parts: Sequence[Any]) -> None:
    """Write the rows of each part of a benchmark, with the machine and the day."""
    rows = {name: [asdict(row) for row in part] for name, part in parts.items()}
    figures = {"day": date.today().isoformat(), "machine": machine(), **rows}
    write_text(path, json.dumps(figures, indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Benchmark:
    """A measurement, and the tables made from it.

    Attributes:
        name: Of the module and of its JSON.
        measure: Yields rows as they are measured.
        parts: The kind of the rows of each part of the JSON.
        tables: The maker of each table of the documents.
        choices: The words that an option takes.
        key: Fields by which a row takes an earlier one's place in the file, which a run adds to where the machine is
            the same; without them the file is written anew. A kind of rows may lack some.
    """

    name: str
    measure: Callable[..., Iterator[Any]]
    parts: Mapping[str, type]
    tables: Mapping[str, Table]
    choices: Mapping[str, Collection[str]] = field(default_factory=dict)
    key: tuple[str, ...] = ()

    def table(self, text: str, name: str) -> str:
        """One of the tables, from the JSON."""
        return self.tables[name](Figures(text, self.parts))

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure, print and write on one thread.

        Returns:
            1 where the gradients under a plan are not those of the plain step.
        """
        options = vars(self._parser().parse_args(arguments))
        path = options.pop("folder") / f"{self.name}.json"
        torch.set_num_threads(1)
        rows = self._earlier(path)
        for number, row in enumerate(self.measure(**options)):
            print(row, flush=True)
            rows[self._place(row) if self.key else (number,)] = row
            parts = {part: [row for row in rows.values() if type(row) is kind] for part, kind in self.parts.items()}
            write_figures(path, **parts)
        for name in self.tables if rows else ():
            shown = self.table(path.read_text(), name)
            print(f"\n{name}\n\n{shown}" if shown else "", end="")
        return int(not all(getattr(row, "equal", True) for row in rows.values()))

    def _earlier(self, path: Path) -> dict[tuple[Any, ...], Any]:
        if not self.key or not path.exists() or json.loads(path.read_text())["machine"] != machine():
            return {}
        figures = Figures(path.read_text(), self.parts)
        return {self._place(row): row for kind in self.parts.values() for row in figures.rows(kind)}

    def _place(self, row: Any) -> tuple[Any, ...]:
        return type(row), *(getattr(row, name, None) for name in self.key)

    def _parser(self) -> ArgumentParser:
        about = (sys.modules[self.measure.__module__].__doc__ or "").splitlines()[0]
        parser = ArgumentParser(description=about, formatter_class=ArgumentDefaultsHelpFormatter)
        told = dict(re.findall(r"^ +(\w+): (.+)$", self.measure.__doc__ or "", re.MULTILINE))
        for name, parameter in inspect.signature(self.measure).parameters.items():
            default, is_flag = parameter.default, parameter.kind is parameter.KEYWORD_ONLY
            words = [f"--{name.replace('_', '-')}" if is_flag else name]
            options: dict[str, Any] = {"default": default, "help": told.get(name, " ")}
            if isinstance(default, bool):
                options["action"] = "store_true"
            elif isinstance(default, tuple):
                options |= {"nargs": "+" if is_flag else "*", "type": self._type(name, default[0])}
            else:
                options["type"] = self._type(name, default)
            parser.add_argument(*words, **options)
        parser.add_argument("--folder", type=Path, default=Path("outputs") / self.name, help="of the JSON")
        return parser

    def _type(self, name: str, default: Any) -> Callable[[str], Any]:
        def known(word: str) -> str:
            if word not in self.choices[name]:
                raise ArgumentTypeError(f"{word!r} is not one of {', '.join(self.choices[name])}")
            return word

        return known if name in self.choices else type(default)
