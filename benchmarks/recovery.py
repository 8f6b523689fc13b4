"""Recovery on scikit-learn's digits: one cut against four, at equal fine-tuning after a cut and at equal epochs in all.

The digits network is trained densely, then every convolution but the first is decomposed to an eighth of its parameters
in a Trainer with `CTDRCallback`. The learning rate is held and falls to zero over the last two epochs (``tuned``).
``short``: 32 steps at the rate of dense training, falling from the first. ``lower``: the same steps at a lower rate.
``scratch``: the rate of dense training, the network untrained. A row a way: test accuracy after the last epoch, its
median and mean over the seeds, and the mean test cross-entropy, which still tells ways apart where accuracy is
saturated.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.digits import RATE, augment, network, seed, train
from benchmarks.harness import Benchmark, table
from benchmarks.trained_nets import BATCH, digits
from ctdr_lightning import CTDRCallback, Ranks, Recovery
from ctdr_lightning.recovery import Distillation, Phase

Way = tuple[list[int], int, Distillation | None]
TEACHER = Distillation(module="net")


class Setting(NamedTuple):
    """Common properties of some ways.

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
    """One way: its setting and name, accuracy in percent of each seed, mean cross-entropy, times fewer parameters."""

    setting: str
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


def recover(dense: nn.Module, way: Way, rank: float, number: int, setting: Setting) -> tuple[float, ...]:
    """Decompose and train a copy; returns accuracy in percent, cross-entropy and parameters."""
    seed(number)
    train_set, test_set = (TensorDataset(*map(torch.cat, zip(*part, strict=True))) for part in digits(16))
    loader = DataLoader(train_set, BATCH, shuffle=True)
    cut_epochs, epochs, distill = way
    steps = int(setting.share * len(loader))
    held = (epochs - setting.falling) * steps
    module = FineTuned(copy.deepcopy(dense), setting.rate, held, setting.falling * steps)
    callback = CTDRCallback(
        rank=rank,
        ranks=Ranks(method="tucker"),
        select=["net.*", "!net.0", "!net.17"],
        recovery=Recovery(cut_epochs=cut_epochs, phases=[Phase(1)], distill=distill),
        policy="keep",
        verbose=False,
    )
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_train_batches=setting.share,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(test_set, 1000))
    found = trainer.callback_metrics
    return float(found["accuracy"]), float(found["loss"]), sum(p.numel() for p in module.parameters())


@cache
def dense_network(epochs: int, number: int) -> nn.Module:
    """The digits network, trained for so many epochs; to be copied."""
    seed(number)
    dense = network()
    if epochs:
        train(dense, epochs, 0.1)
    return dense


def figures(settings: Sequence[str] = tuple(SETTINGS), *, seeds: int = 0, rank: float = 0.125) -> Iterator[Row]:
    """Every way of each setting, over its seeds.

    Args:
        settings: Which.
        seeds: How many; 0 for each setting's own number.
        rank: Share of the parameters.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    n_dense = sum(p.numel() for p in network().parameters())
    for name in settings:
        setting = SETTINGS[name]
        for title, way in setting.ways.items():
            dense = (dense_network(setting.trained, number) for number in range(seeds or setting.seeds))
            runs = [recover(net, way, rank, number, setting) for number, net in enumerate(dense)]
            accuracies, losses, sizes = zip(*runs, strict=True)
            yield Row(name, title, list(accuracies), mean(losses), n_dense / sizes[0])


def _line(row: Row) -> str:
    found = row.accuracies
    seeds = ", ".join(f"{accuracy:.2f}" for accuracy in found)
    return f"{row.name} | {seeds} | {median(found):.2f} | {mean(found):.2f} | {row.loss:.3f} | {row.ratio:.1f}"


HEAD = " | accuracy by seed, % | median | mean | mean cross-entropy | times fewer parameters"
TABLES = {name: table(Row, HEAD, _line, lambda row, name=name: row.setting == name) for name in SETTINGS}
BENCHMARK = Benchmark("recovery", figures, {"rows": Row}, TABLES, {"settings": SETTINGS}, ("setting", "name"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
