"""Accuracy after a cut, epoch by epoch: scikit-learn's digits under ``CTDRCallback(rank=..., recovery=True)``.

The digits network is trained densely. A second Trainer gets the callback, which decomposes all convolutions but the
first, and trains on at a fifth of the rate, which falls to zero over the last two of six epochs. A row is one share of
the parameters, with ranks chosen by the training data or by the weights alone, and one seed: the accuracies on held-out
images that the callback and the module log.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.digits import RATE, seed
from benchmarks.harness import Benchmark, Figures
from benchmarks.recovery import FineTuned, dense_network
from benchmarks.trained_nets import BATCH, digits
from ctdr_lightning import CTDRCallback, Ranks, Recovery

EPOCHS, FALLING, DENSE_EPOCHS = 6, 2, 15


@dataclass(frozen=True)
class Row:
    """Accuracies in percent of one seed at one share of the parameters.

    Attributes:
        share: Share of the parameters that is asked for.
        by_data: Whether training batches choose the ranks and fit the factors, as is the default.
        seed: Of the dense training and of the fine-tuning.
        parameters: Left, as a share of the dense network's.
        dense: Before the cut.
        cut: Right after it.
        batchnorm: After BatchNorm re-estimation.
        epochs: After each epoch of training.
    """

    share: float
    by_data: bool
    seed: int
    parameters: float
    dense: float
    cut: float
    batchnorm: float
    epochs: list[float]


class _Validated(Callback):
    """Accuracy after each epoch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what was logged."""
        self.found.append(float(trainer.callback_metrics["accuracy"]))


def recover(dense: nn.Module, share: float, by_data: bool, number: int) -> Row:
    """Decompose and train a copy of the dense network."""
    seed(number)
    train_set, test_set = (TensorDataset(*map(torch.cat, zip(*part, strict=True))) for part in digits(16))
    loader = DataLoader(train_set, BATCH, shuffle=True)
    steps = len(loader)
    module = FineTuned(copy.deepcopy(dense), RATE, (EPOCHS - FALLING) * steps, FALLING * steps)
    ours = CTDRCallback(
        rank=share,
        select=["net.*", "!net.0", "!net.17"],
        ranks=Ranks(data="train" if by_data else None),
        recovery=Recovery(monitor="accuracy", reference="measure", stop_when_recovered=False),
        policy="keep",
        verbose=False,
    )
    validated = _Validated()
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", callbacks=[ours, validated], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(test_set, 1000))
    left = _size(module) / _size(dense)
    measured = (float(trainer.callback_metrics[f"ctdr/metric_{when}"]) for when in ("dense", "raw", "batchnorm"))
    return Row(share, by_data, number, left, *measured, validated.found)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


WAYS = ((0.25, True), (0.05, True), (0.05, False), (0.02, True))


def figures(*, seeds: int = 5) -> Iterator[Row]:
    """Every way with every seed.

    Args:
        seeds: How many.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # hard cuts are asked for here
    for share, by_data in WAYS:
        for number in range(seeds):
            yield recover(dense_network(DENSE_EPOCHS, number), share, by_data, number)


def curve(row: Row) -> list[float]:
    """The accuracies in the order of the run."""
    return [row.dense, row.cut, row.batchnorm, *row.epochs]


POINTS = ("dense", "cut", "BN", *(f"epoch {number}" for number in range(1, EPOCHS + 1)))


def by_way(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each way, by the words for it in table and chart."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"rank={row.share:g}{'' if row.by_data else ', data=None'}", []).append(row)
    return found


def medians(rows: Sequence[Row]) -> list[float]:
    """The median over the seeds at each point."""
    return [median(values) for values in zip(*map(curve, rows), strict=True)]


def _table(figures: Figures) -> str:
    ways = by_way(figures.rows(Row)).items()
    lines = [" | ".join([f"`{way}`", *(f"{value:.2f}" for value in medians(rows))]) for way, rows in ways]
    return figures.markdown(" | ".join(["", *POINTS]), lines)


BENCHMARK = Benchmark("accuracy_curve", figures, {"rows": Row}, {"table": _table}, key=("share", "by_data", "seed"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
