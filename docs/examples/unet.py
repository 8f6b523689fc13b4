"""A U-Net that segments discs and squares of its own making, and is scored by torchmetrics' mean IoU."""

import argparse

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.segmentation import MeanIoU

from ctdr_lightning import CTDRCallback


def unit(inputs: int, outputs: int) -> nn.Sequential:
    convs = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)]
    norms = [nn.BatchNorm2d(outputs) for _ in convs]
    return nn.Sequential(convs[0], norms[0], nn.ReLU(), convs[1], norms[1], nn.ReLU())


class UNet(LightningModule):
    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList([unit(1, width), unit(width, 2 * width), unit(2 * width, 4 * width)])
        self.up = nn.ModuleList([unit(6 * width, 2 * width), unit(3 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)
        self.iou = MeanIoU(num_classes=classes, input_format="index")

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in self.down:
            skips.append(level(F.max_pool2d(skips[-1], 2) if skips else x))
        x = skips.pop()
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, masks = batch
        return F.cross_entropy(self(images), masks)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, masks = batch
        self.iou(self(images).argmax(1), masks)
        self.log("val/iou", self.iou, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def shapes(n: int, size: int = 48) -> TensorDataset:
    """A disc (class 1) and a square (class 2) on each noisy image."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    at, reach = torch.randint(8, size - 8, (n, 2, 2, 1, 1)), torch.randint(4, 12, (n, 2, 1, 1))
    away = torch.stack([(y - at[:, :, 0]).abs(), (x - at[:, :, 1]).abs()])
    disc, square = away[:, :, 0].square().sum(0) < reach[:, 0] ** 2, away[:, :, 1].amax(0) < reach[:, 1]
    masks = torch.where(square, 2, disc.long())
    return TensorDataset((masks + 0.5 * torch.randn(masks.shape)).unsqueeze(1), masks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--memory-budget", default="24MiB")
    args = parser.parse_args()

    seed_everything(0)
    train, held_out = (DataLoader(shapes(n), batch_size=16) for n in (320, 96))
    ctdr = CTDRCallback(memory_budget=args.memory_budget)
    trainer = Trainer(max_epochs=args.epochs, callbacks=[ctdr], log_every_n_steps=10)
    trainer.fit(UNet(), train, held_out)


if __name__ == "__main__":
    main()
