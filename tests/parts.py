"""Small modules, data and trainers that the Lightning tests share."""

from __future__ import annotations

import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning.memory.guide.events import Differed

warnings.filterwarnings("ignore", module="lightning")


class Blobs(LightningModule):
    """A small BatchNorm CNN with dropout on two kinds of noisy images; Adam with a schedule."""

    def __init__(self, width=8, dropout=0.1):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 4),
        )
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def images(count=32, size=8, seed=0):
    """Noisy images of four kinds, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    kinds = torch.randn(4, 1, size, size, generator=generator)
    return TensorDataset(kinds[labels] + 0.5 * torch.randn(count, 1, size, size, generator=generator), labels)


def loaders(batch_size=8, **options):
    """Training (shuffled) and validation data."""
    return DataLoader(images(), batch_size, shuffle=True, **options), DataLoader(images(16, seed=1), 8)


def blobs(seed=0, **options):
    """A module with weights fixed by a seed."""
    seed_everything(seed, verbose=False)
    return Blobs(**options)


def quiet_trainer(*callbacks, **options):
    """A trainer on the suite's device without output."""
    defaults = {
        "accelerator": torch.get_default_device().type, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2, "log_every_n_steps": 1,
    }  # fmt: skip
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(module, *callbacks, ckpt_path=None, data=None, **options):
    """Train quietly; returns the trainer."""
    trainer = quiet_trainer(*callbacks, **options)
    train, val = data or loaders()
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return trainer


def rank():
    """Rank of this process among forked ones."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def other_ops(events):
    """Steps whose ops were not the planned ones; a thread of gloo's may free a buffer late, so that peaks differ."""
    return [event for event in events if isinstance(event, Differed) and not event.where.startswith("the batch took")]


def same(first, second):
    """Whether two nests of tensors and numbers are equal to the bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second
