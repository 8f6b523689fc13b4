"""The evaluation of CTDR: nine networks, each under seven techniques at four limits.

    ctdr recipes run evaluate                             # predictions at full size, for an A100
    ctdr recipes run evaluate --parts measured accuracy   # what this machine can measure, at small sizes
    ctdr recipes run evaluate --nets LeNet GPT-2 --device h100

Every technique of a network that is done is written to ``FOLDER/evaluation.json`` at once; what is there is not done
again. Beside it lie ``evaluation.md``, ``evaluation.csv`` and ``evaluation.png``.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from time import perf_counter

import torch

from ctdr_lightning import __version__
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.memory.recorder.precision import PRECISIONS
from ctdr_recipes.csv_text import csv_of
from ctdr_recipes.evaluation.learned import TASKS, learn
from ctdr_recipes.evaluation.measured import measure
from ctdr_recipes.evaluation.nets import FULL, SMALL
from ctdr_recipes.evaluation.picture import draw_evaluation
from ctdr_recipes.evaluation.predicted import Variant, anatomies, largest_batch, predict, variants
from ctdr_recipes.evaluation.rows import Row
from ctdr_recipes.evaluation.tables import Evaluation, as_markdown
from ctdr_recipes.evaluation.techniques import TECHNIQUES

PARTS = ("predicted", "batches", "measured", "accuracy")


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what is asked for and not there yet, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2], help="the first two by default")
    parser.add_argument("--nets", nargs="+", choices=list(FULL), default=list(FULL), help="all by default")
    parser.add_argument("--device", default="a100", help="the GPU that predictions are for; a100 by default")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="tf32", help="of the predictions")
    parser.add_argument("--folder", type=Path, default=Path("outputs/evaluation"))
    options = parser.parse_args(arguments)
    path = options.folder / "evaluation.json"
    started = Evaluation(_about(options.device, options.precision))
    found = Evaluation.from_json(path.read_text()) if path.exists() else started
    for part in (part for part in PARTS if part in options.parts):
        for more in _more(found, part, options):
            found = more
            _write(found, options.folder)
    _write(found, options.folder)
    print(as_markdown(found))


def _more(found: Evaluation, part: str, options: argparse.Namespace) -> Iterator[Evaluation]:
    """The figures with each thing that a part adds to them, one after the other."""
    if part == "accuracy":
        for task in (task for task in TASKS if not any(row.task == task for row in found.learned)):
            found = replace(found, learned=(*found.learned, learn(task, TASKS[task])))
            yield found
        return
    for name in options.nets:
        if part == "measured":
            if not any((row.net, row.source) == (name, part) for row in found.rows):
                found = replace(found, rows=(*found.rows, *measure(name, SMALL[name])))
                yield found
            continue
        of = variants(FULL[name], options.device, options.precision)
        for technique in _missing(found, name, part):
            start = perf_counter()
            found = _with(found, name, part, technique, of)
            print(f"{name}: {part}, {technique}: {perf_counter() - start:.0f} s", flush=True)
            yield found


def _missing(found: Evaluation, name: str, part: str) -> list[str]:
    """The techniques of a network that a part of the predictions has not."""
    rows = found.batches if part == "batches" else [row for row in found.rows if row.source == part]
    return [
        technique for technique in TECHNIQUES if (name, technique) not in {(row.net, row.technique) for row in rows}
    ]


def _with(found: Evaluation, name: str, part: str, technique: str, of: dict[str, Variant]) -> Evaluation:
    if part == "batches":
        return replace(found, batches=(*found.batches, largest_batch(name, FULL[name], of, technique)))
    known = any(row.net == name for row in found.anatomies)
    more = [] if known else anatomies(name, FULL[name], of)
    rows = predict(name, FULL[name], of, technique)
    about = {**found.about, "predicted on": date.today().isoformat()}
    return replace(found, about=about, rows=(*found.rows, *rows), anatomies=(*found.anatomies, *more))


def _write(found: Evaluation, folder: Path) -> None:
    write_text(folder / "evaluation.json", found.to_json())
    write_text(folder / "evaluation.csv", csv_of(Row, found.rows))
    write_text(folder / "evaluation.md", as_markdown(found))
    draw_evaluation(found.rows, folder / "evaluation.png")


def _about(device: str, precision: str) -> dict[str, str]:
    return {
        "predictions": f"for one {device} in {precision}: its operators, times by a model of its kernels; nothing ran",
        "measurements": f"{platform.machine()} processor, one thread, true peaks with weights, gradients and Adam",
        "versions": f"ctdr-lightning {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    main()
