"""Ways to use a Trainer: module, options, data and callbacks of each; docs/lightning.md has a row for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from tests import parts


class DictBatches(parts.Blobs):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["inputs"]["image"], batch["labels"][0]), batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch["inputs"]["image"], batch["labels"][0]), batch_idx)


class TwoVals(parts.Blobs):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


class NoIndex(parts.Blobs):
    def training_step(self, batch):
        return {"loss": super().training_step(batch, 0), "more": torch.zeros(1)}


class Configured(parts.Blobs):
    def __init__(self):
        super().__init__()
        del self.net
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(3)
            self.net = parts.Blobs().net


class Gan(LightningModule):
    """Two optimizers, stepped by hand; a BatchNorm generator."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        real = batch[0].flatten(1)
        fake = self.generator(torch.randn(len(real), 16))
        self.toggle_optimizer(second)
        loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        other = -self.critic(fake).mean()
        first.zero_grad()
        self.manual_backward(other)
        first.step()
        self.untoggle_optimizer(first)
        self.log("critic", loss)
        self.losses += [loss.detach().clone(), other.detach().clone()]

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.SGD(self.critic.parameters(), 1e-2)


class ByHand(parts.Blobs):
    """Accumulates over two batches and clips, by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Closures(parts.Blobs):
    """LBFGS calls the training step several times a batch."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


class Plateau(parts.Blobs):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class OneCycle(parts.Blobs):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Groups(parts.Blobs):
    def configure_optimizers(self):
        last = list(self.net[-1].parameters())
        rest = [p for p in self.parameters() if all(p is not other for other in last)]
        return torch.optim.Adam([{"params": rest}, {"params": last, "lr": 1e-2, "weight_decay": 0.1}], 1e-3)


class Checkpointed(parts.Blobs):
    """Its own recomputation inside of ours."""

    def forward(self, x):
        return self.net[6:](checkpoint(self.net[:6], x, use_reentrant=False))


class Skips(parts.Blobs):
    """Returns no loss for one batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class EndsEarly(parts.Blobs):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class TwoTrains(parts.Blobs):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx) + 0.5 * super().training_step(batch["b"], batch_idx)


class ReadsGradients(parts.Blobs):
    def __init__(self):
        super().__init__()
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        self.losses.append(sum(p.grad.norm() for p in self.parameters() if p.grad is not None).clone())


class OwnHooks(parts.Blobs):
    """Its own backward, zero_grad and clipping."""

    def backward(self, loss, *args, **kwargs):
        (2 * loss).backward()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class Average(parts.Blobs):
    """Keeps a running average in a buffer, outside of the step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4, 16))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        weight = self.net[-1].weight.detach()
        self.average.mul_(0.9).add_(0.1 * weight)


class Measured(parts.Blobs):
    """Torchmetrics as submodules, in the step as well."""

    def __init__(self):
        super().__init__()
        self.accuracy = nn.ModuleDict({"fit": MulticlassAccuracy(4), "val": MulticlassAccuracy(4)})

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.accuracy["fit"](self.net[:1](batch[0]).mean((2, 3))[:, :4], batch[1])
        self.log("train_acc", self.accuracy["fit"], on_epoch=True)
        return super().training_step(batch, batch_idx)


class OwnData(parts.Blobs):
    """Its data are there after ``setup`` alone."""

    def setup(self, stage):
        self.train_data, self.val_data = parts.loaders()

    def train_dataloader(self):
        return self.train_data

    def val_dataloader(self):
        return self.val_data


class Shared(parts.Blobs):
    """One layer stands in two places."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return self.net[7:](self.mix(torch.tanh(self.mix(self.net[:7](x)))))


class LastChannels(parts.Blobs):
    def forward(self, x):
        return self.net(x.contiguous(memory_format=torch.channels_last))


class Backbone(parts.Blobs):
    """What BackboneFinetuning freezes, and adds to the optimizer in the second epoch."""

    def __init__(self):
        super().__init__()
        self.backbone = self.net[:3]

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=2e-3)


class Frozen(parts.Blobs):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[3].requires_grad_(False)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(parts.images())


def dicts(dataset):
    images, labels = torch.utils.data.default_collate(dataset)
    return {"inputs": {"image": images}, "labels": [labels, "a word"]}


def as_dicts():
    return tuple(DataLoader(parts.images(seed=s), 8, collate_fn=dicts) for s in (0, 1))


def streamed():
    return DataLoader(Stream(), 8), DataLoader(Stream(), 8)


def two_val_loaders():
    train, val = parts.loaders()
    return train, [val, DataLoader(parts.images(8, seed=2), 4)]


def no_val():
    return parts.loaders()[0], None


def two_train_loaders():
    each = {"a": DataLoader(parts.images(), 8, shuffle=True), "b": DataLoader(parts.images(20, seed=4), 6)}
    return CombinedLoader(each, "max_size_cycle"), None


def uneven():
    return parts.loaders(batch_size=7)


def none():
    return None, None


@dataclass(frozen=True)
class Way:
    """One way to use a Trainer.

    Attributes:
        kind: Makes the module.
        options: Of the Trainer.
        data: Makes the training and validation loaders.
        others: Makes the other callbacks, from a folder of the test.
        cuts: Whether layers may be decomposed as well.
    """

    kind: Callable[[], LightningModule] = parts.Blobs
    options: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], tuple[Any, Any]] = parts.loaders
    others: Callable[[Any], list[Any]] = lambda folder: []
    cuts: bool = True


def stopping(folder):
    return [callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)]


def saving(folder):
    return [callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)]


WAYS = {
    "single device": Way(),
    "bf16-mixed": Way(options={"precision": "bf16-mixed"}),
    "bf16-true": Way(options={"precision": "bf16-true"}),
    "64-true": Way(options={"precision": "64-true"}),
    "accumulation": Way(options={"accumulate_grad_batches": 3}),
    "GradientAccumulationScheduler": Way(others=lambda f: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]),
    "clipping by norm": Way(options={"gradient_clip_val": 0.1}),
    "clipping by value": Way(options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manual optimization, two optimizers": Way(Gan, data=no_val),
    "manual optimization with accumulation and clipping": Way(ByHand),
    "a closure called several times (LBFGS)": Way(Closures),
    "ReduceLROnPlateau": Way(Plateau),
    "a schedule of steps (OneCycleLR)": Way(OneCycle),
    "parameter groups": Way(Groups),
    "configure_model": Way(Configured),
    "fast_dev_run": Way(options={"fast_dev_run": 2}),
    "overfit_batches": Way(options={"overfit_batches": 2}),
    "limits": Way(options={"limit_train_batches": 2, "limit_val_batches": 1}),
    "max_steps": Way(options={"max_steps": 5, "max_epochs": -1}),
    "max_time": Way(options={"max_time": {"hours": 1}}),
    "min_epochs": Way(options={"min_epochs": 2, "max_epochs": 3}, others=stopping),
    "barebones": Way(options={"barebones": True}),
    "iterable data": Way(data=streamed),
    "nested dict batches": Way(DictBatches, data=as_dicts),
    "several train dataloaders": Way(TwoTrains, data=two_train_loaders),
    "several val dataloaders": Way(TwoVals, data=two_val_loaders),
    "a smaller last batch": Way(data=uneven),
    "worker processes": Way(data=lambda: parts.loaders(num_workers=1)),
    "data of the module's own setup": Way(OwnData, data=none),
    "reload_dataloaders_every_n_epochs": Way(options={"reload_dataloaders_every_n_epochs": 1}),
    "no batch_idx, dict output": Way(NoIndex),
    "a step that returns None": Way(Skips),
    "an epoch ended by on_train_batch_start": Way(EndsEarly),
    "hooks that read gradients": Way(ReadsGradients),
    "own backward, zero_grad and clipping": Way(OwnHooks),
    "own activation checkpointing": Way(Checkpointed),
    "a buffer written between steps": Way(Average),
    "torchmetrics in the step": Way(Measured),
    "a layer used twice": Way(Shared),
    "channels_last": Way(LastChannels),
    "frozen layers": Way(Frozen),
    "val every 2 epochs": Way(options={"check_val_every_n_epoch": 2}),
    "val within the epoch": Way(options={"val_check_interval": 2}),
    "no validation": Way(options={"limit_val_batches": 0}),
    "sanity check of the whole validation": Way(options={"num_sanity_val_steps": -1}),
    "inference_mode=False": Way(options={"inference_mode": False}),
    "anomaly detection": Way(options={"detect_anomaly": True}),
    "deterministic": Way(options={"deterministic": True}),
    "profiler": Way(options={"profiler": "simple"}),
    "EarlyStopping": Way(options={"max_epochs": 4}, others=stopping),
    "ModelCheckpoint": Way(options={"enable_checkpointing": True}, others=saving),
    "LearningRateMonitor with a logger": Way(others=lambda f: [callbacks.LearningRateMonitor("step")]),
    "EMAWeightAveraging": Way(others=lambda f: [callbacks.EMAWeightAveraging(decay=0.8)]),
    "StochasticWeightAveraging": Way(
        options={"max_epochs": 4}, others=lambda f: [callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1)]
    ),
    "BackboneFinetuning": Way(Backbone, others=lambda f: [callbacks.BackboneFinetuning(1)], cuts=False),
    "ModelPruning": Way(others=lambda f: [callbacks.ModelPruning("l1_unstructured", amount=0.3)], cuts=False),
    "Timer": Way(others=lambda f: [callbacks.Timer()]),
}  # fmt: skip


def build(name, folder, *ours):
    """A module, a Trainer with our callbacks first, and the data of a way."""
    way = WAYS[name]
    parts.seed_everything(0, verbose=False)
    module, options = way.kind(), dict(way.options)
    if options.get("barebones"):
        options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar")) | options
        options |= {"enable_model_summary": None, "log_every_n_steps": None}
    if name == "LearningRateMonitor with a logger":
        options["logger"] = CSVLogger(folder)
    trainer = parts.quiet_trainer(*ours, *way.others(folder), **{"default_root_dir": folder, **options})
    return module, trainer, way.data()


def train(name, folder, *ours):
    """Train in one of the ways; returns the module and its Trainer."""
    module, trainer, (train, val) = build(name, folder, *ours)
    trainer.fit(module, train, val)
    return module, trainer
