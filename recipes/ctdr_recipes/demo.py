"""Dense against CTDR on real handwritten digits: one table, one picture. Run it with ``make demo``.

A small BatchNorm network is trained with a plain Trainer. Then two more Trainers get a CTDRCallback: one decomposes the
network and fine-tunes it, the other chooses ranks and recomputation together for a memory budget. Every figure of the
table is measured in the run: accuracy on the held-out images, and over further training batches in those same Trainers
the time of a step and its true peak of memory, weights, gradients, Adam's state and temporaries of the kernels
included.

``FOLDER/demo.json`` keeps the figures; the README's table is made from a committed copy of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning import Callback, Trainer, seed_everything
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from ctdr_lightning import CTDRCallback, Recovery, __version__
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.progress_bar import track
from ctdr_lightning.basics.units import format_bytes, format_seconds
from ctdr_lightning.recovery import Phase
from ctdr_recipes.classifier import Classifier, cnn
from ctdr_recipes.data import DigitsData
from ctdr_recipes.measure import MemoryUse, one_thread
from ctdr_recipes.meter import StepMeter
from ctdr_recipes.picture import draw_memory

FOLDER = Path("outputs/demo")
WIDTHS = (32, 64, 64, 64, 128, 128, 128, 256, 256, 256)
STRIDES = (1, 1, 1, 1, 2, 1, 1, 2, 1, 1)
RANKS: dict[str, float | str] = {"decomposed": 0.2, "for 30 MiB": "auto"}
MEMORY: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "decomposed": {"policy": "keep"},
    "for 30 MiB": {"memory_budget": "30MiB"},
}
BATCH_SIZE = 64
PLANNING_BATCHES = 4


@dataclass(frozen=True)
class Effort:
    """The length of the demo.

    Attributes:
        dense_epochs: Epochs of the dense network.
        fine_epochs: Epochs of fine-tuning after the decomposition.
        rounds: How often each network's steps are timed, in turns.
        n_batches: Steps timed in a round.
    """

    dense_epochs: int = 10
    fine_epochs: int = 3
    rounds: int = 4
    n_batches: int = 10


SHORT = Effort(dense_epochs=3, fine_epochs=1, rounds=1, n_batches=4)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        parameters: Number of parameters.
        accuracy: Share of the held-out images that are told right.
        memory: Live bytes over a step.
        step_s: Median seconds of a step.
    """

    parameters: int
    accuracy: float
    memory: MemoryUse
    step_s: float


def run(effort: Effort, data: DigitsData) -> dict[str, Row]:
    """Train the three networks, then measure them.

    Args:
        effort: How long to train and to measure.
        data: The digits.

    Returns:
        A row for each network, the dense one first.
    """
    models: dict[str, Classifier] = {}
    accuracies = {}
    for name, memory_options in MEMORY.items():
        print(f"\n== {name} ==", flush=True)
        seed_everything(0, verbose=False)
        callbacks: list[Callback] = []
        if memory_options is None:
            model, epochs = _classifier(cnn(WIDTHS, STRIDES), lr=3e-3), effort.dense_epochs
        else:
            model, epochs = _classifier(deepcopy(models["dense"].net), lr=1e-3), effort.fine_epochs
            recovery = Recovery(phases=[Phase(epochs=epochs)])
            callbacks = [CTDRCallback(rank=RANKS[name], recovery=recovery, **memory_options)]
        accuracies[name] = _train(model, data, callbacks, epochs)
        models[name] = model
    times, memory = _measure(models, data, effort)
    return {name: Row(_size(model), accuracies[name], memory[name], times[name]) for name, model in models.items()}


def table(rows: Mapping[str, Row]) -> str:
    """Lay the rows out as text."""
    lines = [f"{'':<24}{'parameters':>11}{'accuracy':>10}{'peak of a step':>16}{'step time':>11}{'samples/s':>11}"]
    for name, row in rows.items():
        peak, seconds = format_bytes(row.memory.peak_bytes), format_seconds(row.step_s)
        speed = BATCH_SIZE / row.step_s
        lines.append(f"{name:<24}{row.parameters:>11,}{row.accuracy:>10.2%}{peak:>16}{seconds:>11}{speed:>11,.0f}")
    return "\n".join(lines)


def to_json(rows: Mapping[str, Row]) -> str:
    """The table's figures as JSON, with today's date and the versions that they were measured with."""
    versions = f"ctdr-lightning {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    figures = {
        name: {
            "parameters": row.parameters,
            "accuracy": row.accuracy,
            "peak_bytes": row.memory.peak_bytes,
            "step_s": row.step_s,
        }
        for name, row in rows.items()
    }
    return json.dumps({"day": date.today().isoformat(), "versions": versions, "rows": figures}, indent=1) + "\n"


def from_json(text: str) -> dict[str, Row]:
    """Read what ``to_json`` wrote; of the live bytes only the peak is kept."""
    return {
        name: Row(row["parameters"], row["accuracy"], MemoryUse((0.0,), (row["peak_bytes"],)), row["step_s"])
        for name, row in json.loads(text)["rows"].items()
    }


def summary(rows: Mapping[str, Row]) -> str:
    """Say in a sentence what the last row is to the first."""
    names = list(rows)
    dense, ours = rows[names[0]], rows[names[-1]]
    return (
        f"{names[-1]} against {names[0]}: {dense.parameters / ours.parameters:.1f}x fewer parameters, "
        f"{(ours.accuracy - dense.accuracy) * 100:+.2f} points of accuracy, "
        f"{ours.memory.peak_bytes / dense.memory.peak_bytes:.0%} of the peak, "
        f"{ours.step_s / dense.step_s:.0%} of the step time"
    )


def _classifier(net: nn.Module, lr: float) -> Classifier:
    optimizer = partial(torch.optim.AdamW, lr=lr, weight_decay=0.01)
    return Classifier(net, 10, optimizer, partial(OneCycleLR, max_lr=lr, pct_start=0.2))


def _train(model: Classifier, data: DigitsData, callbacks: list[Callback], epochs: int) -> float:
    trainer = _trainer(callbacks, max_epochs=epochs, enable_progress_bar=True)
    trainer.fit(model, datamodule=data)
    return float(trainer.callback_metrics["val/acc"])


def _measure(
    models: Mapping[str, Classifier], data: DigitsData, effort: Effort
) -> tuple[dict[str, float], dict[str, MemoryUse]]:
    print("\n== measuring, in turns, on one thread ==", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    memory = {}
    turns = [(name, number == effort.rounds) for number in range(effort.rounds + 1) for name in models]
    for name, profile in track(turns, "measure", total=len(turns)):
        meter = StepMeter(PLANNING_BATCHES, effort.n_batches, profile)
        memory_options = MEMORY[name]
        planned = [CTDRCallback(rank=None, verbose=False, **memory_options)] if memory_options else []
        n_batches = PLANNING_BATCHES + effort.n_batches
        trainer = _trainer([meter, *planned], max_epochs=1, limit_train_batches=n_batches, limit_val_batches=0)
        trainer.fit(models[name], datamodule=data)
        seconds[name] += meter.seconds
        if meter.memory is not None:
            memory[name] = meter.memory
    return {name: median(taken) for name, taken in seconds.items()}, memory


def _trainer(callbacks: list[Callback], enable_progress_bar: bool = False, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=enable_progress_bar,
        num_sanity_val_steps=0,
        **options,
    )


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Run the demo, print the table and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="train less and measure less, to see that it runs")
    effort = SHORT if parser.parse_args().short else Effort()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda line: "CTDR" in line.getMessage())
    with one_thread():
        rows = run(effort, DigitsData(BATCH_SIZE))
    print(f"\n{table(rows)}\n\n{summary(rows)}")
    write_text(FOLDER / "demo.json", to_json(rows))
    picture = FOLDER / "memory.png"
    curves = {name: row.memory.lasting(row.step_s) for name, row in rows.items() if name != "decomposed"}
    draw_memory(curves, picture, "One training step with Adam, batch 64: dense, and with CTDRCallback")
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
