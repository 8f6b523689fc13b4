"""LightningCLI with the callback in its configuration.

    python cli.py fit --config config.yaml
    python cli.py fit --config config.yaml --trainer.callbacks.memory_budget=4MiB

Without arguments it fits with the following configuration, which is also a config.yaml:

    seed_everything: 0
    trainer:
      max_epochs: 2
      log_every_n_steps: 5
      callbacks:
        - class_path: ctdr_lightning.CTDRCallback
          init_args:
            memory_budget: 5MiB
    model: {width: 32}
    data: {batch_size: 64}
"""

import sys

import torch
import torch.nn.functional as F
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CONFIG = __doc__.partition("config.yaml:\n")[2]


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.train, self.held_out = random_split(TensorDataset(pixels, torch.tensor(labels)), [1400, 397])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.batch_size)


class Classifier(LightningModule):
    def __init__(self, width: int = 32, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        convs = [nn.Conv2d(inputs, width, 3, padding=1) for inputs in (1, width, width, width)]
        self.body = nn.Sequential(*(layer for conv in convs for layer in (conv, nn.BatchNorm2d(width), nn.ReLU())))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val/acc", (self(images).argmax(1) == labels).float().mean(), batch_size=len(images), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    LightningCLI(Classifier, Digits, args=sys.argv[1:] or ["fit", "--config", CONFIG])
