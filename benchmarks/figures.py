"""What a benchmark measured, as JSON with the machine, the versions and the day; and the Markdown made from it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.files import write_text

_PACKAGES = ("ctdr-lightning", "torch", "lightning", "tensorly", "numpy", "scipy", "torchvision", "transformers")


def machine() -> dict[str, Any]:
    """What figures were measured on."""
    versions = {found.metadata["Name"]: found.version for found in distributions()}
    return {
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


def write_figures(path: Path, **parts: Sequence[Any]) -> None:
    """Write the rows of each part of a benchmark, with the machine and the day.

    Args:
        path: A JSON file; its stem is the benchmark's name in ``benchmarks.documents``.
        parts: Dataclasses by the name of their part.
    """
    rows = {name: [asdict(row) for row in part] for name, part in parts.items()}
    figures = {"day": date.today().isoformat(), "machine": machine(), **rows}
    write_text(path, json.dumps(figures, indent=1) + "\n")


def rows_of(text: str, part: str, kind: type) -> list[Any]:
    """The rows of one part of what ``write_figures`` wrote, as ``kind``."""
    return [kind(**row) for row in json.loads(text)[part]]


def markdown(text: str, lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its head first, and when and on what its figures were measured.

    Args:
        text: What ``write_figures`` wrote.
        lines: The cells of each line.
    """
    head, *body = lines
    shown = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in shown) + f"\n{measured_on(text)}\n"


def measured_on(text: str) -> str:
    """A sentence: day, processor and versions of what ``write_figures`` wrote."""
    figures = json.loads(text)
    found = figures["machine"]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in _PACKAGES[:2] if name in found["versions"])
    return f"Measured on {figures['day']}: {found['processor']}, {found['cores']} cores; {versions}."
