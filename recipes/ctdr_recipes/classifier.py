"""The LightningModule of the recipes, and the small network of the demo."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.sharding import shard, share_buffers


class Classifier(LightningModule):
    """Cross-entropy training of any network that maps images to logits; logs loss and accuracy.

    Args:
        net: Maps a batch of images to logits with shape ``(N, n_classes)``.
        n_classes: Number of classes.
        optimizer: Builds the optimizer from parameters, such as ``partial(torch.optim.AdamW, lr=1e-3)``.
        scheduler: Builds the learning-rate schedule from the optimizer and ``total_steps``, stepped every batch, such
            as ``partial(OneCycleLR, max_lr=1e-3)``; None keeps the rate.
    """

    def __init__(
        self,
        net: nn.Module,
        n_classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.accuracy = nn.ModuleDict(
            {stage: MulticlassAccuracy(n_classes, average="micro") for stage in ("val", "test")}
        )

    def configure_model(self) -> None:
        """Shard the network under ``ModelParallelStrategy``, which alone has a mesh; once, although called again."""
        if self.device_mesh is not None:
            shard(self.net, self.device_mesh["data_parallel"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a sharded step with the same buffers on every process."""
        self._share_buffers()

    def on_validation_start(self) -> None:
        """Score the same sharded network on every process."""
        self._share_buffers()

    def on_test_start(self) -> None:
        """Score the same sharded network on every process."""
        self._share_buffers()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits with shape ``(N, n_classes)``."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the batch's mean cross-entropy, and log it."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/acc``."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test/loss`` and ``test/acc``."""
        self._evaluate("test", batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer over what the network holds now, so after a decomposition over its factors."""
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        schedule = self.scheduler(optimizer, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _share_buffers(self) -> None:
        if self.device_mesh is not None:
            share_buffers(self.net, self.device_mesh["data_parallel"])

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        accuracy: Any = self.accuracy[stage]
        accuracy(logits, labels)
        self.log(f"{stage}/loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log(f"{stage}/acc", accuracy, prog_bar=True)


def cnn(widths: Sequence[int], strides: Sequence[int], in_channels: int = 1, n_classes: int = 10) -> nn.Sequential:
    """Build a plain network: 3 x 3 convolution, BatchNorm and ReLU for each width, then a linear classifier.

    The first of these stages is called ``stem``, the others ``stage1``, ``stage2`` and so on, the classifier ``head``.

    Args:
        widths: Output channels of each convolution.
        strides: Stride of each convolution.
        in_channels: Channels of the images.
        n_classes: Number of classes.

    Returns:
        A network from images ``(N, in_channels, H, W)`` to logits ``(N, n_classes)``.

    Raises:
        ConfigError: When there are not as many strides as widths.
    """
    if len(widths) != len(strides):
        raise ConfigError(
            f"The network has {len(widths)} widths and {len(strides)} strides.",
            "Give one of each for each convolution: model.net.widths=[8,16] model.net.strides=[1,2].",
        )
    stages: dict[str, nn.Module] = {}
    channels = in_channels
    for number, (width, stride) in enumerate(zip(widths, strides, strict=True)):
        conv = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        stages[f"stage{number}" if number else "stem"] = nn.Sequential(
            OrderedDict(conv=conv, norm=nn.BatchNorm2d(width), relu=nn.ReLU(inplace=True))
        )
        channels = width
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(OrderedDict(**stages, pool=nn.Sequential(*pool), head=nn.Linear(channels, n_classes)))
