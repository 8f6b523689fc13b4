"""Training of one small net on shards, by each way to shard it; plain, under a callback, and resumed."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.memory.account.gathers import StayingUnits
from ctdr_lightning.trainer.training_step import unit_weights
from tests import parts
from tests.trainer.test_sharded_peaks import Gpt, Mlp
from tests.trainer.test_tensor_parallel import Perceptrons

STEPS, EPOCHS = 4, 3  # of an epoch; the third one's steps are settled, whether the run is fresh or resumed
HUGE = 2**40


def sharded_by(data, tensor=1):
    """FSDP2 over some processes, tensor parallelism over others."""
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo")


class FullyShard(Gpt):
    """FSDP2; activations are most of the bytes."""

    def data(self):
        words = torch.randint(200, (4 * STEPS * 24, 33), generator=torch.Generator().manual_seed(0))
        return TensorDataset(words[:, :-1].clone(), words[:, 1:].clone()), 24

    @staticmethod
    def strategy(ranks, **_):
        return sharded_by(ranks)


class FromMeta(Mlp):
    """FSDP2 of layers that Lightning makes after they are sharded."""

    strategy = FullyShard.strategy

    def __init__(self):
        with torch.device("meta"):
            super().__init__()


class TensorParallel(Perceptrons):
    """The blocks of perceptrons, with data of its own: the same for all processes, or for each a part."""

    parts = 1

    def data(self):
        generator, count = torch.Generator().manual_seed(0), self.parts * STEPS * 1024
        images = torch.randn(count, 64, generator=generator)
        return TensorDataset(images, torch.randint(10, (count,), generator=generator)), 1024

    @staticmethod
    def strategy(ranks, **_):
        return sharded_by(1, ranks)


class Normed(TensorParallel):
    """With a BatchNorm before the blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(128))


class Both(TensorParallel):
    """Tensor parallelism within pairs, FSDP2 over them."""

    parts = 2

    def configure_model(self):
        super().configure_model()
        for unit in (self.first, *self.blocks, self.head):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    @staticmethod
    def strategy(ranks, **_):
        return sharded_by(ranks // 2, 2)


class Replicated(FullyShard):
    """DDP."""

    def configure_model(self):
        pass

    @staticmethod
    def strategy(ranks, **ddp):
        return DDPStrategy(process_group_backend="gloo", **ddp)


class Unused(Replicated):
    """One block is not run in every second batch."""

    def training_step(self, batch, batch_idx):
        self.skips = batch_idx % 2 == 1
        return super().training_step(batch, batch_idx)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks[self.skips :]:
            x = block(x)
        return self.head(x)


KINDS = {"FSDP2": FullyShard, "tensor parallel": TensorParallel, "both": Both, "DDP": Replicated}


class Peaks(Callback):
    """Has the batches of the last epoch measured."""

    def __init__(self, ours):
        self.ours, self.bytes = ours, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == EPOCHS - 1:
            self.ours.run.steps.meters.batch_begins(metered=True)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == EPOCHS - 1:
            self.bytes.append(self.ours.run.steps.meters.measured.peak_bytes)


def callback_of(**options):
    return CTDRCallback(**{"rank": None, "verbose": False, **options})


def run(kind, *callbacks, ranks=2, ddp=None, **options):
    """Train; returns the module."""
    parts.seed_everything(0, verbose=False)
    module = kind()
    data, batch_size = module.data()
    strategy, loaders = kind.strategy(ranks, **ddp or {}), (DataLoader(data, batch_size), None)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options = {"max_epochs": 1, "limit_train_batches": STEPS, **options}
    parts.fit(module, *callbacks, data=loaders, strategy=strategy, devices=ranks, enable_checkpointing=saves, **options)
    return module


def results(module):
    """Losses, and this process' weights."""
    return module.losses, [p.to_local() if hasattr(p, "to_local") else p.detach() for p in module.parameters()]


def planned(kind, budget, *callbacks, **options):
    """Train under a budget; returns losses and weights, the callback, and the peaks of settled batches."""
    ours = callback_of(memory_budget=budget)
    peaks = Peaks(ours)
    found = results(run(kind, ours, peaks, *callbacks, **{"max_epochs": EPOCHS, **options}))
    return found, ours, peaks.bytes


def plain_peak_bytes(kind, **options):
    """The least measured peak of any process where nothing is planned, and FSDP2 frees units as it does by itself."""
    with patch.object(unit_weights, "choose_staying", lambda *_: StayingUnits(())):
        _, ours, peaks = planned(kind, HUGE, **options)
    assert ours.run.memory.session.plan.keeps_all
    return least_of_all(min(peaks))


def least_of_all(number):
    """The least of all processes' numbers."""
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def saver(folder):
    """A checkpoint after each epoch."""
    return ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
