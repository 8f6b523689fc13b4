"""Tensor parallelism on two ranks: what a layer's shards save is planned, within budgets and to the bit."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.memory.guide.events import Differed
from ctdr_lightning.trainer.training_step.surprises import freed_late
from tests import forks, parts

STEPS = 6


class Perceptrons(LightningModule):
    """Blocks whose hidden activations are shards."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.losses = nn.Linear(64, 128), nn.Linear(128, 10), []
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)
        )

    def configure_model(self):
        for block in self.blocks:
            styles = {"1": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], styles)

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        for block in self.blocks:
            x = x + block(x)
        loss = F.cross_entropy(self.head(x), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def run(**options):
    parts.seed_everything(0, verbose=False)
    module, callback = Perceptrons(), CTDRCallback(rank=None, verbose=False, **options)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(STEPS * 512, 64, generator=generator)
    data = TensorDataset(images, torch.randint(10, (STEPS * 512,), generator=generator))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    parts.fit(module, callback, data=(DataLoader(data, 512), None), strategy=strategy, devices=2, max_steps=STEPS)
    return module, callback.run.memory.session


def shards(module):
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]


def check_budgets(share):
    plain, whole = run(memory_budget=2**30)
    module, session = run(memory_budget=int(share * whole.plan.peak_bytes))
    assert session.plan.peak_bytes <= share * whole.plan.peak_bytes
    assert session.plan.actions
    assert freed_late(session.plan.trace) == 4 * 512 * 128, "an all-reduce's result, which a thread of gloo's holds"
    assert not any(isinstance(event, Differed) for event in session.events)
    assert parts.same(plain.losses, module.losses)
    assert parts.same(shards(plain), shards(module))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.55])
def test_budgets_are_kept_to_the_bit(share):
    assert forks.run(check_budgets, share, ranks=2) == [0, 0]
