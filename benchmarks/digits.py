"""Accuracy after decomposition on scikit-learn's digits: raw, after BatchNorm re-estimation, after fine-tuning.

``python -m benchmarks.digits`` trains a small BatchNorm network (279 k parameters, about ten seconds a seed),
decomposes every convolution but the first in each way, re-estimates BatchNorm, fine-tunes for three epochs at
learning rate 0.02, and re-estimates BatchNorm again on images without augmentation, as `Recovery` does before each
validation. It prints the median over the seeds; one test image is 0.14 point.

``FOLDER/digits.json`` keeps the figures; `benchmarks.documents` makes a table of a committed copy of it.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from benchmarks.figures import markdown, rows_of, write_figures
from ctdr_lightning import Report, decompose
from ctdr_lightning.recovery.batchnorm import reestimate

EPOCHS, RATE, BATCH = 3, 0.02, 64
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


class Digits:
    """The 1,797 digits at 16 x 16, 1,078 of them for training."""

    def __init__(self) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
        self.images = F.interpolate(images, scale_factor=2, mode="bilinear")
        self.labels = torch.tensor(digits.target)
        everything = np.arange(len(self.labels))
        self.train, self.test = train_test_split(everything, test_size=0.4, random_state=0, stratify=self.labels)

    def batches(self) -> list[Tensor]:
        """Training images in order, not augmented."""
        return [self.images[self.train[i : i + BATCH]] for i in range(0, len(self.train), BATCH)]


def network() -> nn.Sequential:
    """Five conv-BatchNorm-ReLU stages and a linear classifier."""

    def stage(n_in: int, n_out: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]

    stages = [*stage(1, 32), *stage(32, 64, 2), *stage(64, 64), *stage(64, 128, 2), *stage(128, 128)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def augment(images: Tensor) -> Tensor:
    """Shift by up to one pixel and add noise."""
    dx, dy = np.random.randint(-1, 2, 2)
    return torch.roll(images, (int(dx), int(dy)), (2, 3)) + 0.15 * torch.randn_like(images)


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Test accuracy in percent."""
    predicted = model.eval()(data.images[data.test]).argmax(1)
    return (predicted == data.labels[data.test]).float().mean().item() * 100


def train(model: nn.Module, data: Digits, epochs: int, rate: float) -> None:
    """SGD: Nesterov 0.9, weight decay 1e-4, cosine."""
    steps = epochs * len(data.batches())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.train))
        for i in range(0, len(order), BATCH):
            batch = data.train[order[i : i + BATCH]]
            loss = F.cross_entropy(model(augment(data.images[batch])), data.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)


CONVOLUTIONS = ["3", "6", "9", "12"]


def channel_share(share: float) -> Cut:
    """Tucker with both ranks a share of the channels."""

    def cut(model: nn.Module) -> Report:
        layers = {name: model.get_submodule(name) for name in CONVOLUTIONS}
        ranks = {n: (int(c.in_channels * share), int(c.out_channels * share)) for n, c in layers.items()}
        return decompose(model, rank=ranks, method="tucker", select=CONVOLUTIONS, progress=False)

    return cut


def tucker_parameters(c: nn.Module, share: float) -> int:
    """Parameters of a 3 x 3 convolution's Tucker form with both ranks a share of the channels."""
    a, b = int(c.in_channels * share), int(c.out_channels * share)
    return c.in_channels * a + 9 * a * b + c.out_channels * b


def same_parameters(share: float, method: str) -> Cut:
    """A method with as many parameters a layer as Tucker with both ranks a share of the channels."""

    def cut(model: nn.Module) -> Report:
        layers = {name: model.get_submodule(name) for name in CONVOLUTIONS}
        rank = {name: tucker_parameters(c, share) / c.weight.numel() for name, c in layers.items()}
        return decompose(model, rank=rank, method=method, select=CONVOLUTIONS, progress=False)

    return cut


def same_in_all(share: float) -> Cut:
    """Tucker with as many parameters in all as with both ranks a share of the channels, spent over all layers."""

    def cut(model: nn.Module) -> Report:
        layers = [model.get_submodule(name) for name in CONVOLUTIONS]
        kept = sum(tucker_parameters(c, share) for c in layers) / sum(c.weight.numel() for c in layers)
        return parameter_share(kept, "parameters", "tucker")(model)

    return cut


def parameter_share(share: float, allocate: str | None = None, method: str = "auto", data: Digits | None = None) -> Cut:
    """A share of the parameters, the same a layer or spent over all of them."""

    def cut(model: nn.Module) -> Report:
        batches = data.batches() if data else None
        options = {"allocate": allocate, "select": CONVOLUTIONS, "progress": False, "data": batches}
        return decompose(model, rank=share, method=method, **options)

    return cut


def cuts(data: Digits) -> dict[str, Cut]:
    """Every row of the table."""
    rows = {f"tucker, ranks 1/{k}": channel_share(1 / k) for k in (2, 4, 8)}
    rows["tucker, as many parameters in all as ranks 1/8, allocated"] = same_in_all(1 / 8)
    for method, k in (
        ("cp", 4),
        ("cp", 8),
        ("cp4", 8),
        ("tt", 4),
        ("tt", 8),
        ("spatial", 4),
        ("spatial", 8),
        ("svd", 4),
    ):
        rows[f"{method}, parameters as tucker 1/{k}"] = same_parameters(1 / k, method)
    for k in (4, 8, 16):
        rows[f"auto, 1/{k} of each layer"] = parameter_share(1 / k)
        rows[f"auto, 1/{k} of all, allocated"] = parameter_share(1 / k, "parameters")
        rows[f"tucker, 1/{k} of each layer"] = parameter_share(1 / k, method="tucker")
        rows[f"tucker, 1/{k} of all, allocated"] = parameter_share(1 / k, "parameters", "tucker")
    rows["tucker, 1/8 of each layer, data-aware"] = parameter_share(1 / 8, method="tucker", data=data)
    return rows


def measure(dense: nn.Module, cut: Cut, data: Digits, number: int) -> tuple[float, ...]:
    """Compression, then accuracy raw, after BatchNorm, after fine-tuning, and after BatchNorm again."""
    model = copy.deepcopy(dense)
    found = [cut(model).compression, accuracy(model, data)]
    seed(number)
    reestimate(model, model, data.batches())
    found.append(accuracy(model, data))
    train(model, data, EPOCHS, RATE)
    found.append(accuracy(model, data))
    reestimate(model, model, data.batches())
    return (*found, accuracy(model, data))


def table(text: str) -> str:
    """The figures of a ``digits.json`` as a Markdown table."""
    dense, *rows = rows_of(text, "rows", Row)
    lines = [["", "times fewer parameters", "raw", "BN", f"{EPOCHS} epochs", "BN"]]
    lines.append([dense.name, "1", f"{dense.raw:.2f}", "", "", ""])
    lines += [[name, *(f"{number:.2f}" for number in found)] for name, *found in map(astuple, rows)]
    return markdown(text, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--folder", type=Path, default=Path("outputs/digits"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # hard cuts are asked for here
    torch.set_num_threads(1)
    data, trained = Digits(), []
    for number in range(options.seeds):
        seed(number)
        trained.append(network())
        train(trained[-1], data, 15, 0.1)
    dense = [accuracy(model, data) for model in trained]
    print(f"dense: {median(dense):.2f} % ({', '.join(f'{a:.2f}' for a in dense)})")
    found = [Row("dense", 1.0, *[median(dense)] * 4)]
    print(f"{'':60s} {'x fewer':>8s} {'raw':>7s} {'BN':>7s} {f'{EPOCHS} ep':>7s} {'BN':>7s}   after all, each seed")
    for name, cut in cuts(data).items():
        if options.only in name:
            rows = [measure(model, cut, data, number) for number, model in enumerate(trained)]
            medians = [median(column) for column in zip(*rows, strict=True)]
            found.append(Row(name, *medians))
            write_figures(options.folder / "digits.json", rows=found)
            shown = " ".join(f"{number:7.2f}" for number in medians)
            print(f"{name:60s}  {shown}   {', '.join(f'{row[-1]:.2f}' for row in rows)}", flush=True)


if __name__ == "__main__":
    main()
