"""FSDP2 on two ranks: peaks are predicted and measured as they are, budgets are kept, and no step differs."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.memory.guide.events import Differed, PlanMade
from ctdr_lightning.memory.recorder.profiler import memory_profiler
from ctdr_lightning.memory.values.live_bytes import LiveBytes
from ctdr_lightning.trainer.training_step.events import GradientsFreed, RestGrew
from ctdr_lightning.trainer.training_step.optimizer.resident import local_bytes, state_bytes
from tests import forks, parts
from tests.in_turn import in_turn
from tests.true_peaks import TruePeaks

STEPS, SETTLED = 10, 4  # the first steps are recorded, once more after the choice of units, and watched


class Gpt(LightningModule):
    """Activations of a step take several times the bytes of its weights."""

    shards = None

    def __init__(self, width=64, vocabulary=200):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, **options) for _ in range(3))
        self.head = nn.Linear(width, vocabulary)
        self.losses = []

    def data(self):
        words = torch.randint(200, (STEPS * 16, 33), generator=torch.Generator().manual_seed(0))
        return TensorDataset(words[:, :-1].clone(), words[:, 1:].clone()), 8

    def configure_model(self):
        for unit in (*self.blocks, self):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"], shard_placement_fn=self.shards)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]).flatten(0, -2), batch[1].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Mlp(Gpt):
    """Weights, gathered ones and gradients take a third of the bytes; shards are those of the last dimension."""

    def __init__(self):
        LightningModule.__init__(self)
        self.tokens, self.head, self.losses = nn.Linear(64, 128), nn.Linear(128, 10), []
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.Tanh(), nn.LayerNorm(128))
            for _ in range(4)
        )

    @staticmethod
    def shards(weight):
        return Shard(weight.ndim - 1) if weight.size(-1) % 2 == 0 else None

    def data(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(STEPS * 1024, 64, generator=generator)
        return TensorDataset(images, torch.randint(10, (STEPS * 1024,), generator=generator)), 512


class Manual(Gpt):
    """Two steps of the optimizer a batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


class Peaks(Callback):
    """The peaks of settled batches: those that the callback measured, and bounds by the allocations."""

    def __init__(self):
        self.measured, self.true = [], TruePeaks()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx >= SETTLED:  # a step that is recorded watches the allocations itself
            self.before = standing_bytes(trainer, module, batch)
            self.profiler = memory_profiler()
            self.profiler.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx >= SETTLED:
            self.profiler.__exit__(None, None, None)
            self.true.add(self.profiler, self.before, standing_bytes(trainer, module, batch))
            for callback in trainer.callbacks:
                if isinstance(callback, CTDRCallback):
                    self.measured.append(callback.run.steps.meters.measured.peak_bytes)


def standing_bytes(trainer, module, batch):
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return local_bytes([*module.parameters(), *batch, *gradients]) + state_bytes(trainer.optimizers)


def run(kind, budget=None):
    """The module, its gradients after the last step, the peaks, and the callback's session."""
    parts.seed_everything(0, verbose=False)
    module, peaks = kind(), Peaks()
    ours = [] if budget is None else [CTDRCallback(rank=None, memory_budget=budget, verbose=False)]
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    data, batch_size = module.data()
    loaders = DataLoader(data, batch_size), None
    parts.fit(module, *ours, peaks, data=loaders, strategy=strategy, devices=2, max_steps=STEPS)
    gradients = [p.grad.to_local().clone() for p in module.parameters()]
    return module, gradients, peaks, ours[0].run.memory.session if ours else None


def check_peaks(kind):
    plain, gradients, before, _ = run(kind)
    live = LiveBytes()
    live.track(plain.parameters())
    assert live.now == local_bytes(plain.parameters()) < sum(p.nbytes for p in plain.parameters())
    for budget in (2**30, int(0.7 * before.true.least)):
        module, same, peaks, session = run(kind, budget)
        assert 0.99 * peaks.true.least <= min(peaks.measured) <= 1.01 * peaks.true.most
        assert max(peaks.measured) <= budget
        stay = not any(isinstance(event, GradientsFreed) for event in session.events)
        with_gradients = session.plan.forward_peak_bytes + stay * local_bytes(same)
        assert max(session.plan.peak_bytes, with_gradients) == pytest.approx(min(peaks.measured), rel=0.02)
        assert len([event for event in session.events if isinstance(event, PlanMade)]) == 1
        assert not [event for event in session.events if isinstance(event, Differed | RestGrew)]
        assert parts.same(plain.losses, module.losses)
        assert parts.same(gradients, same)


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_turn([Gpt, Mlp], (), pytest.mark.exhaustive))
def test_predicted_peaks_are_the_true_ones_and_budgets_are_kept(kind):
    assert forks.run(check_peaks, kind, ranks=2) == [0, 0]


@pytest.mark.slow
def test_manual_optimization_of_shards_equals_the_plain_one():
    def train():
        assert parts.same(run(Manual)[0].losses, run(Manual, "20MiB")[0].losses)

    assert forks.run(train, ranks=2) == [0, 0]
