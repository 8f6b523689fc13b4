"""Accuracy after decomposition on scikit-learn's digits: raw, after BatchNorm re-estimation, after fine-tuning.

A small BatchNorm network (279 k parameters, about ten seconds a seed) is trained. Every convolution but the first is
decomposed in each way, BatchNorm re-estimated, the network fine-tuned for three epochs at learning rate 0.02, and
BatchNorm re-estimated again on images without augmentation, as `Recovery` does before each validation. A row is the
median over the seeds; one test image is 0.14 point.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Benchmark, table
from benchmarks.nets import unit
from benchmarks.trained_nets import BATCH, digits
from ctdr_lightning import Report, decompose
from ctdr_lightning.recovery.batchnorm import reestimate

EPOCHS, RATE = 3, 0.02
Cut = Callable[[nn.Module], Report]


@dataclass(frozen=True)
class Row:
    """Medians of one way to decompose: times fewer parameters, then accuracies in percent."""

    name: str
    ratio: float
    raw: float
    batchnorm: float
    fine_tuned: float
    batchnorm_again: float


def images() -> list[Tensor]:
    """Training images in order, not augmented."""
    return [batch for batch, _ in digits(16)[0]]


def network() -> nn.Sequential:
    """Five conv-BatchNorm-ReLU stages and a linear classifier."""
    stages = [*unit(1, 32), *unit(32, 64, stride=2), *unit(64, 64), *unit(64, 128, stride=2), *unit(128, 128)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def augment(images: Tensor) -> Tensor:
    """Shift by up to one pixel and add noise."""
    dx, dy = np.random.randint(-1, 2, 2)
    return torch.roll(images, (int(dx), int(dy)), (2, 3)) + 0.15 * torch.randn_like(images)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Test accuracy in percent."""
    inputs, labels = map(torch.cat, zip(*digits(16)[1], strict=True))
    return (model.eval()(inputs).argmax(1) == labels).float().mean().item() * 100


def train(model: nn.Module, epochs: int, rate: float) -> None:
    """SGD: Nesterov 0.9, weight decay 1e-4, cosine."""
    inputs, labels = map(torch.cat, zip(*digits(16)[0], strict=True))
    steps = epochs * len(images())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).split(BATCH):
            loss = F.cross_entropy(model(augment(inputs[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)


CONVOLUTIONS = ["3", "6", "9", "12"]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The convolutions that are decomposed."""
    return {name: model.get_submodule(name) for name in CONVOLUTIONS}


def decomposing(rank: Callable[[nn.Module], Any], **options: Any) -> Cut:
    """A way to decompose, with ranks made from the dense network."""
    return lambda model: decompose(model, rank=rank(model), select=CONVOLUTIONS, progress=False, **options)


def channel_share(share: float) -> Cut:
    """Tucker with both ranks a share of the channels."""

    def ranks(model: nn.Module) -> dict[str, tuple[int, int]]:
        layers = layers_of(model).items()
        return {name: (int(c.in_channels * share), int(c.out_channels * share)) for name, c in layers}

    return decomposing(ranks, method="tucker")


def tucker_parameters(c: nn.Module, share: float) -> int:
    """Parameters of a 3 x 3 convolution's Tucker form with both ranks a share of the channels."""
    a, b = int(c.in_channels * share), int(c.out_channels * share)
    return c.in_channels * a + 9 * a * b + c.out_channels * b


def same_parameters(share: float, method: str) -> Cut:
    """A method with as many parameters a layer as Tucker with both ranks a share of the channels."""

    def ranks(model: nn.Module) -> dict[str, float]:
        return {name: tucker_parameters(c, share) / c.weight.numel() for name, c in layers_of(model).items()}

    return decomposing(ranks, method=method)


def same_in_all(share: float) -> Cut:
    """Tucker with as many parameters in all as with both ranks a share of the channels, spent over all layers."""

    def rank(model: nn.Module) -> float:
        layers = layers_of(model).values()
        return sum(tucker_parameters(c, share) for c in layers) / sum(c.weight.numel() for c in layers)

    return decomposing(rank, method="tucker", allocate="parameters")


def parameter_share(share: float, allocate: str | None = None, method: str = "auto", data: Any = None) -> Cut:
    """A share of the parameters, the same a layer or spent over all of them."""
    return decomposing(lambda model: share, allocate=allocate, method=method, data=data)


def cuts() -> dict[str, Cut]:
    """Every row of the table."""
    rows = {f"tucker, ranks 1/{k}": channel_share(1 / k) for k in (2, 4, 8)}
    rows["tucker, as many parameters in all as ranks 1/8, allocated"] = same_in_all(1 / 8)
    for way in ("cp 4", "cp 8", "cp4 8", "tt 4", "tt 8", "spatial 4", "spatial 8", "svd 4"):
        method, k = way.split()
        rows[f"{method}, parameters as tucker 1/{k}"] = same_parameters(1 / int(k), method)
    for k in (4, 8, 16):
        for method in ("auto", "tucker"):
            rows[f"{method}, 1/{k} of each layer"] = parameter_share(1 / k, method=method)
            rows[f"{method}, 1/{k} of all, allocated"] = parameter_share(1 / k, "parameters", method)
    rows["tucker, 1/8 of each layer, data-aware"] = parameter_share(1 / 8, method="tucker", data=images())
    return rows


def measure(dense: nn.Module, cut: Cut, number: int) -> tuple[float, ...]:
    """Compression, then accuracy raw, after BatchNorm, after fine-tuning, and after BatchNorm again."""
    model = copy.deepcopy(dense)
    found = [cut(model).compression, accuracy(model)]
    seed(number)
    reestimate(model, model, images())
    found.append(accuracy(model))
    train(model, EPOCHS, RATE)
    found.append(accuracy(model))
    reestimate(model, model, images())
    return (*found, accuracy(model))


def figures(*, seeds: int = 3, only: str = "") -> Iterator[Row]:
    """The dense network, then every way to decompose it.

    Args:
        seeds: How many networks are trained.
        only: Ways whose name contains this.
    """
    warnings.simplefilter("ignore")  # hard cuts are asked for here
    trained = []
    for number in range(seeds):
        seed(number)
        trained.append(network())
        train(trained[-1], 15, 0.1)
    yield Row("dense", 1.0, *[median(accuracy(model) for model in trained)] * 4)
    for name, cut in cuts().items():
        if only in name:
            found = [measure(model, cut, number) for number, model in enumerate(trained)]
            yield Row(name, *map(median, zip(*found, strict=True)))


def _line(row: Row) -> str:
    if row.name == "dense":
        return f"dense | 1 | {row.raw:.2f} |  |  | "
    return " | ".join([row.name, *(f"{number:.2f}" for number in astuple(row)[1:])])


TABLE = table(Row, f" | times fewer parameters | raw | BN | {EPOCHS} epochs | BN", _line)
BENCHMARK = Benchmark("digits", figures, {"rows": Row}, {"table": TABLE})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
