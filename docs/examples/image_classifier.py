"""A small ResNet on scikit-learn's handwritten digits, under a memory budget and with every layer dense."""

import argparse

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ctdr_lightning import CTDRCallback


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class Classifier(LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(
            Block(width, width), Block(width, 2 * width, stride=2), Block(2 * width, 4 * width, stride=2)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self(images).argmax(1) == labels).float().mean()
        self.log("val/acc", accuracy, batch_size=len(images), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--memory-budget", default="9MiB")
    args = parser.parse_args()

    seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    images = F.interpolate(torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), scale_factor=2)
    train, held_out = random_split(TensorDataset(images, torch.tensor(labels)), [1400, 397])
    # rank=None: no layer is decomposed, and the weights equal those of a run without the callback, bit for bit.
    ctdr = CTDRCallback(memory_budget=args.memory_budget, rank=None)
    trainer = Trainer(max_epochs=args.epochs, callbacks=[ctdr], log_every_n_steps=10)
    trainer.fit(Classifier(), DataLoader(train, 64, shuffle=True, drop_last=True), DataLoader(held_out, 64))


if __name__ == "__main__":
    main()
