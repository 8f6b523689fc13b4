"""Batches of 60 lengths in one run under a budget: every batch keeps it, the plans are bounded, no bit differs."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback
from ctdr_lightning.memory.guide.events import Differed
from ctdr_lightning.memory.guide.step_kinds import MOST_KINDS, MOST_OPS
from ctdr_lightning.memory.many_shapes import MOST_REMEMBERED
from tests import parts
from tests.trainer.true_peaks import Peaks

WIDTH, VOCABULARY, BATCH = 32, 32, 4


class Words(LightningModule):
    """A small causal transformer on tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses = []

    def training_step(self, batch, batch_idx):
        mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1] - 1)
        logits = self.head(self.blocks(self.embedding(batch[:, :-1]), mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class PeaksByLength(Peaks):
    """The highest peak of the batches of each length."""

    def __init__(self):
        super().__init__()
        self.by_length = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        length = batch.shape[1]
        self.by_length[length] = max(self.by_length.get(length, 0), self.bytes[-1])


def train(lengths, *callbacks):
    parts.seed_everything(0, verbose=False)
    module, peaks = Words(), PeaksByLength()
    batches = [torch.randint(VOCABULARY, (BATCH, length)) for length in lengths]
    data = DataLoader(batches, batch_size=None, shuffle=False), None
    parts.fit(module, *callbacks, peaks, data=data, max_epochs=2, log_every_n_steps=50)
    return module, peaks.by_length


def shuffled(lengths):
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(3))
    return [lengths[index] for index in order]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, pytest.param(0.75, marks=pytest.mark.slow)])
def test_every_length_keeps_the_budget_and_few_are_searched(share):
    lengths = shuffled(list(range(21, 141, 2)))
    plain, needs = train(lengths)
    budget_bytes = int(share * max(needs.values()))
    callback = CTDRCallback(rank=None, memory_budget=budget_bytes, verbose=False)
    planned, peaks = train(lengths, callback)
    session, counts = callback.run.memory.session, callback.run.memory.planner.shapes.counts
    assert len(peaks) == len(set(lengths)) == 60
    over = {length: n for length, n in peaks.items() if n > budget_bytes}
    assert not over
    assert parts.same(plain.losses, planned.losses)
    assert parts.same(plain.state_dict(), planned.state_dict())
    assert counts["searched"] <= 3
    assert counts["transferred"] + counts["polished"] >= 5
    assert not [event for event in session.events if isinstance(event, Differed)]
    assert len(session.plans) == 60 <= MOST_KINDS
    assert sum(len(plan.trace.ops) for plan in session.plans) <= MOST_OPS
    assert callback.run.memory.planner.shapes.n_remembered <= MOST_REMEMBERED


def test_untouched_lengths_are_foreseen_and_watched_together():
    lengths = shuffled(list(range(21, 61, 2)))
    callback = CTDRCallback(rank=None, memory_budget="1GiB", verbose=False)
    recorded = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            recorded.append(not callback.run.memory.session.guided)

    train(lengths, callback, Notes())
    largest_so_far = sum(length >= max(lengths[: place + 1]) for place, length in enumerate(lengths))
    assert sum(recorded) == largest_so_far
    assert not any(recorded[len(lengths) :])


@pytest.mark.slow
def test_more_lengths_than_are_kept_leave_bounded_plans():
    lengths = list(range(8, 8 + MOST_KINDS + 6))
    callback = CTDRCallback(rank=None, memory_budget="1GiB", verbose=False)
    plain, planned = train(lengths)[0], train(lengths, callback)[0]
    assert len(callback.run.memory.session.plans) <= MOST_KINDS
    assert parts.same(plain.losses, planned.losses)
