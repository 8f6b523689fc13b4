"""The evaluation of CTDR: nine networks, each dense, decomposed, recomputed, offloaded, and by CTDR.

    ctdr recipes run evaluate                             # predictions at full size, for an A100
    ctdr recipes run evaluate --parts measured accuracy   # what this machine can measure, at small sizes
    ctdr recipes run evaluate --nets LeNet GPT-2 --device h100

Every part that is done is written to ``FOLDER/evaluation.json`` at once; a part that is there is not done again. Beside
it lie ``evaluation.md``, ``evaluation.csv`` and ``evaluation.png``.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ctdr_lightning import __version__
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.memory.recorder.precision import PRECISIONS
from ctdr_recipes.csv_text import csv_of
from ctdr_recipes.evaluation.learned import TASKS, learn
from ctdr_recipes.evaluation.measured import measure
from ctdr_recipes.evaluation.nets import FULL, SMALL
from ctdr_recipes.evaluation.picture import draw_evaluation
from ctdr_recipes.evaluation.predicted import Row, predict, with_batches
from ctdr_recipes.evaluation.tables import Evaluation, as_markdown

PARTS = ("predicted", "batches", "measured", "accuracy")


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what is asked for and not there yet, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:2], help="the first two by default")
    parser.add_argument("--nets", nargs="+", choices=list(FULL), default=list(FULL), help="all by default")
    parser.add_argument("--device", default="a100", help="the GPU that predictions are for; a100 by default")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="32-true", help="of the predictions")
    parser.add_argument("--folder", type=Path, default=Path("outputs/evaluation"))
    options = parser.parse_args(arguments)
    path = options.folder / "evaluation.json"
    found = (
        Evaluation.from_json(path.read_text())
        if path.exists()
        else Evaluation(_about(options.device, options.precision))
    )
    asked = {*options.parts, *(["predicted"] if "batches" in options.parts else [])}
    for name in options.nets:
        for part in (part for part in PARTS[:3] if part in asked):
            if not _done(found, name, part):
                found = _with_net(found, name, part, options)
                _write(found, options.folder)
    for task in TASKS if "accuracy" in options.parts else ():
        if not any(row.task == task for row in found.learned):
            found = replace(found, learned=(*found.learned, learn(task, TASKS[task])))
            _write(found, options.folder)
    _write(found, options.folder)
    print(as_markdown(found))


def _done(found: Evaluation, name: str, part: str) -> bool:
    if part == "batches":
        return any(row.net == name and row.largest_batch for row in found.rows)
    return any((row.net, row.source) == (name, part) for row in found.rows)


def _with_net(found: Evaluation, name: str, part: str, options: argparse.Namespace) -> Evaluation:
    print(f"{name}: {part} ...", flush=True)
    if part == "measured":
        return replace(found, rows=(*found.rows, *measure(name, SMALL[name])))
    if part == "batches":
        own = [row for row in found.rows if (row.net, row.source) == (name, "predicted")]
        others = [row for row in found.rows if row not in own]
        return replace(found, rows=(*others, *with_batches(own, FULL[name], options.device, options.precision)))
    rows, anatomies = predict(name, FULL[name], options.device, options.precision)
    return replace(found, rows=(*found.rows, *rows), anatomies=(*found.anatomies, *anatomies))


def _write(found: Evaluation, folder: Path) -> None:
    write_text(folder / "evaluation.json", found.to_json())
    write_text(folder / "evaluation.csv", csv_of(Row, found.rows))
    write_text(folder / "evaluation.md", as_markdown(found))
    draw_evaluation(found.rows, folder / "evaluation.png")


def _about(device: str, precision: str) -> dict[str, str]:
    return {
        "predictions": f"for one {device} in {precision} by a roofline model, with its own kernels; none was run",
        "measurements": f"{platform.machine()} processor, one thread, true peaks with weights, gradients and Adam",
        "versions": f"ctdr-lightning {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    main()
