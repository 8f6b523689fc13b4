"""Recovery on scikit-learn's digits: one cut against four, at equal fine-tuning after a cut and at equal epochs in all.

``python -m benchmarks.recovery`` trains the digits network densely, then decomposes every convolution but the first to
an eighth of its parameters in a Trainer with `CTDRCallback`. The learning rate is held and falls to zero over the last
two epochs (``tuned``). ``short``: 32 steps at the rate of dense training, falling from the first. ``lower``: the same
steps at a lower rate. ``scratch``: the rate of dense training, the network untrained. A row a way: test accuracy after
the last epoch, its median and mean over the seeds, and the mean test cross-entropy, which still tells ways apart where
accuracy is saturated.

``FOLDER/recovery.json`` keeps the figures; `benchmarks.documents` makes a table of a committed copy of it.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.digits import BATCH, RATE, Digits, augment, network, train
from benchmarks.figures import markdown, rows_of, write_figures
from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.recovery import Distillation, Phase

Way = tuple[list[int], int, Distillation | None]
TEACHER = Distillation(module="net")


class Setting(NamedTuple):
    """What the ways have in common.

    Args:
        ways: Cut epochs, epochs in all and teacher, by name.
        rate: Learning rate.
        falling: Epochs at the end over which it falls.
        share: Share of the training images seen in an epoch.
        trained: Epochs of dense training.
        seeds: How many seeds it takes to tell the ways apart.
    """

    ways: dict[str, Way]
    rate: float
    falling: int
    share: float = 1.0
    trained: int = 15
    seeds: int = 3


TUNED: dict[str, Way] = {
    "one cut, 2 epochs": ([0], 2, None),
    "cuts before epochs 0, 2, 4, 6 of 8": ([0, 2, 4, 6], 8, None),
    "cuts before epochs 0, 1, 2, 3 of 8": ([0, 1, 2, 3], 8, None),
    "the same, with a teacher": ([0, 1, 2, 3], 8, TEACHER),
    "one cut, 8 epochs": ([0], 8, None),
    "one cut, 8 epochs, with a teacher": ([0], 8, TEACHER),
}
SHORT: dict[str, Way] = {"one cut": ([0], 4, None), "cuts at 0, 1, 2, 3 of 4": ([0, 1, 2, 3], 4, None)}
SCRATCH: dict[str, Way] = {
    "one cut at 0 of 8": ([0], 8, None),
    "one cut at 4 of 8": ([4], 8, None),
    "cuts at 0, 2, 4, 6 of 8": ([0, 2, 4, 6], 8, None),
}
SETTINGS = {
    "tuned": Setting(TUNED, RATE, 2),
    "short": Setting(SHORT, 0.1, 4, share=0.5, seeds=9),
    "lower": Setting(SHORT, RATE, 4, share=0.5, seeds=9),
    "scratch": Setting(SCRATCH, 0.1, 8, trained=0, seeds=9),
}


@dataclass(frozen=True)
class Row:
    """One way: its name, accuracy in percent of each seed, mean cross-entropy, times fewer parameters."""

    name: str
    accuracies: list[float]
    loss: float
    ratio: float


class FineTuned(LightningModule):
    """The digits network with SGD at a rate that falls to zero in the end.

    Args:
        net: Dense.
        rate: Learning rate.
        held: Steps before the rate falls.
        falling: Steps over which it falls.
    """

    def __init__(self, net: nn.Module, rate: float, held: int, falling: int) -> None:
        super().__init__()
        self.net, self.rate, self.held, self.falling = net, rate, held, falling

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of shifted and noisy images."""
        return functional.cross_entropy(self.net(augment(batch[0])), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accuracy in percent, and cross-entropy."""
        logits = self.net(batch[0])
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean() * 100)
        self.log("loss", functional.cross_entropy(logits, batch[1]))

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict]]:
        """Nesterov momentum; the rate is held, then half a cosine down to zero."""
        optimizer = torch.optim.SGD(self.parameters(), self.rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _share(self, step: int) -> float:
        fallen = min(max(step - self.held, 0) / self.falling, 1)
        return (1 + math.cos(math.pi * fallen)) / 2


def recover(dense: nn.Module, data: Digits, way: Way, rank: float, seed: int, setting: Setting) -> tuple[float, ...]:
    """Decompose and train a copy; returns accuracy in percent, cross-entropy and parameters."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    images = {name: TensorDataset(data.images[part], data.labels[part]) for name, part in
              (("train", data.train), ("test", data.test))}  # fmt: skip
    loader = DataLoader(images["train"], BATCH, shuffle=True)
    cut_epochs, epochs, distill = way
    recovery = Recovery(cut_epochs=cut_epochs, phases=[Phase(1)], distill=distill)
    steps = int(setting.share * len(loader))
    held = (epochs - setting.falling) * steps
    module = FineTuned(copy.deepcopy(dense), setting.rate, held, setting.falling * steps)
    callback = CTDRCallback(
        rank=rank,
        method="tucker",
        select=["net.*", "!net.0", "!net.17"],
        recovery=recovery,
        policy="keep",
        verbose=False,
    )
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_train_batches=setting.share,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(images["test"], 1000))
    found = trainer.callback_metrics
    return float(found["accuracy"]), float(found["loss"]), sum(p.numel() for p in module.parameters())


@cache
def dense_network(data: Digits, epochs: int, seed: int) -> nn.Module:
    """The digits network, trained for so many epochs; to be copied."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    dense = network()
    if epochs:
        train(dense, data, epochs, 0.1)
    return dense


def rows_in(setting: Setting, data: Digits, rank: float, n_seeds: int) -> list[Row]:
    """Every way of a setting, over its seeds."""
    n_dense = sum(p.numel() for p in network().parameters())
    found = []
    for name, way in setting.ways.items():
        runs = [recover(dense_network(data, setting.trained, seed), data, way, rank, seed, setting)
                for seed in range(n_seeds)]  # fmt: skip
        accuracies, losses, sizes = zip(*runs, strict=True)
        found.append(Row(name, list(accuracies), mean(losses), n_dense / sizes[0]))
    return found


def table(text: str, part: str) -> str:
    """One setting of a ``recovery.json`` as a Markdown table."""
    lines = [["", "accuracy by seed, %", "median", "mean", "mean cross-entropy", "times fewer parameters"]]
    for row in rows_of(text, part, Row):
        seeds = ", ".join(f"{accuracy:.2f}" for accuracy in row.accuracies)
        middle = f"{median(row.accuracies):.2f}", f"{mean(row.accuracies):.2f}"
        lines.append([row.name, seeds, *middle, f"{row.loss:.3f}", f"{row.ratio:.1f}"])
    return markdown(text, lines)


def main() -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", choices=[*SETTINGS, []], help="all by default")
    parser.add_argument("--seeds", type=int, help="in the place of the settings' own number")
    parser.add_argument("--rank", type=float, default=0.125)
    parser.add_argument("--folder", type=Path, default=Path("outputs/recovery"))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data, path, found = Digits(), arguments.folder / "recovery.json", {}
    for name in arguments.settings or SETTINGS:
        setting = SETTINGS[name]
        found[name] = rows_in(setting, data, arguments.rank, arguments.seeds or setting.seeds)
        write_figures(path, **found)
        print(f"{name}\n\n{table(path.read_text(), name)}", flush=True)


if __name__ == "__main__":
    main()
