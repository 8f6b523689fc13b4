"""Batches whose steps are recorded, because no plan is there yet, keep every budget that their plans keep later."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import plan
from ctdr_lightning.memory.guide.events import OverBudget
from ctdr_lightning.trainer.training_step.events import RecordedOverBudget
from tests import parts
from tests.trainer.true_peaks import Peaks


class Block(nn.Module):
    """Attention and a perceptron, with dropout: on a processor its masks can only be held."""

    def __init__(self, width, heads=2):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        n, length = x.shape[:2]
        parts = self.qkv(self.norms[0](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(seen))
        return x + self.drop(self.mlp(self.norms[1](x)))


class Text(LightningModule):
    """A GPT whose logits are its largest tensors."""

    words, optimizer = 256, torch.optim.SGD

    def __init__(self, width=24, depth=3):
        super().__init__()
        self.token, self.head = nn.Embedding(self.words, width), nn.Linear(width, self.words, bias=False)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.losses = []

    def training_step(self, batch, batch_idx):
        logits = self.head(self.blocks(self.token(batch[:, :-1])))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), 1e-3)


class AdamText(Text):
    words, optimizer = 64, torch.optim.AdamW


class Images(parts.Blobs):
    """The shared CNN on larger batches."""

    def __init__(self):
        super().__init__(width=8, dropout=0.5)


def data_of(kind):
    generator = torch.Generator().manual_seed(0)
    if issubclass(kind, Images):
        batches = [(torch.randn(32, 1, 16, 16, generator=generator), torch.arange(32) % 4) for _ in range(5)]
    else:
        batches = [torch.randint(kind.words, (16, 17), generator=generator) for _ in range(5)]
    return DataLoader(batches, batch_size=None, shuffle=False), None


def train(kind, accumulate, *callbacks):
    parts.seed_everything(0, verbose=False)
    module, peaks = kind(), Peaks()
    options = {"max_epochs": 1, "accumulate_grad_batches": accumulate, "log_every_n_steps": 50}
    parts.fit(module, *callbacks, peaks, data=data_of(kind), **options)
    return module, peaks.bytes


def callback_for(budget):
    return CTDRCallback(rank=None, memory_budget=budget, verbose=False)


def tight_budget(kind, accumulate):
    """A twentieth more than the least peak at which all kinds of steps have plans, with the bytes beside them."""
    loose, least = callback_for("1GiB"), []
    train(kind, accumulate, loose)
    for made in loose.run.memory.session.plans:
        with pytest.raises(InfeasibleBudgetError) as refused:
            plan(made.trace, 1)
        least.append(refused.value.least_peak_bytes)
    assert len(least) == 1 + (accumulate > 1)
    return int(1.05 * max(*least, loose.run.memory.rest_peak_bytes))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "accumulate"), [(Text, 1), (Text, 4), (AdamText, 4), (Images, 1), (Images, 4)])
def test_recorded_batches_keep_a_budget_that_has_plans(kind, accumulate):
    budget = tight_budget(kind, accumulate)
    plain, needed = train(kind, accumulate)
    callback = callback_for(budget)
    planned, peaks = train(kind, accumulate, callback)
    events = callback.run.memory.session.events
    assert max(needed) > 1.2 * budget, "the first batches are under pressure"
    assert max(peaks) <= budget, ([f"x{n / budget:.3f}" for n in peaks], events)
    assert not [event for event in events if isinstance(event, OverBudget | RecordedOverBudget)]
    assert parts.same(plain.losses, planned.losses)
    assert parts.same(plain.state_dict(), planned.state_dict())
