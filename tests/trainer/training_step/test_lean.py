"""A language model under a budget that its logits break: they are never made, and nothing else changes."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB
from tests.trainer.training_step.runs import events_of, one_epoch

WORDS, WIDTH, BATCH, LENGTH = 8000, 32, 4, 300
# 113 MiB with logits, of which there are 36.6 MiB; 28 MiB without them.
TIGHT, LARGE = 40 * MIB, 300 * MIB


class LanguageModel(LightningModule):
    """Embedding, one block, head."""

    def __init__(self, kind="plain", **layers):
        super().__init__()
        self.kind, self.losses = kind, []
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.metric = Perplexity()

    def training_step(self, batch, batch_idx):
        h = self.embedding(batch)
        logits = self.head(h + self.block(h))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch[:, 1:].reshape(-1))
        self.losses.append(loss.detach())
        if self.kind == "metric":
            self.metric(logits[:, :-1], batch[:, 1:])
        if self.kind == "values":
            self.last = loss.item()
        if self.kind == "returned":
            return {"loss": loss, "logits": logits}
        return loss + 1e-4 * logits.logsumexp(-1).square().mean() if self.kind == "z-loss" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeps(CTDRCallback):
    """Looks at the outputs after the optimizer's step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if isinstance(outputs, dict):
            self.seen = outputs["logits"].clone()


def trained(*callbacks, kind="plain", **options):
    torch.manual_seed(0)
    module = LanguageModel(kind)
    data = DataLoader(torch.randint(WORDS, (5 * BATCH, LENGTH)), BATCH)
    return one_epoch(module, data, *callbacks, **options)


@pytest.fixture(scope="module")
def plain():
    return trained()


def agree(found, wanted):
    assert torch.allclose(found[1], wanted[1], rtol=0, atol=1e-5)
    for mine, theirs in zip(found[0].parameters(), wanted[0].parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["if_needed", None])
def test_a_budget_that_logits_break_is_kept_without_them(plain, rank):
    callback = CTDRCallback(TIGHT, rank=rank)
    found = trained(callback)
    agree(found, plain)
    assert min(plain[2].bytes) > 2 * TIGHT
    assert max(found[2].bytes) <= TIGHT
    assert callback.run.memory.last_plan.keeps_all
    assert any("output of head is not made: its loss is taken in 5 chunks" in event for event in events_of(callback))
    assert "output of head is not made" in callback.run.memory.last_plan.explain()
    assert "forward" not in vars(found[0].head)


@pytest.mark.slow
def test_a_budget_that_holds_the_logits_leaves_every_bit(plain):
    found = trained(CTDRCallback(LARGE))
    assert torch.equal(found[1], plain[1])


@pytest.mark.slow
def test_rounding_can_be_forbidden(plain):
    with pytest.raises(InfeasibleBudgetError):
        trained(CTDRCallback(TIGHT, rank=None, memory={"rounding": False}))


@pytest.mark.slow
def test_the_rest_of_the_step_is_planned(plain):
    untouched = CTDRCallback(TIGHT, rank=None)
    trained(untouched)
    budget = untouched.run.memory.last_plan.peak_bytes - 2**16
    callback = CTDRCallback(budget, rank=None)
    found = trained(callback)
    agree(found, plain)
    assert max(found[2].bytes) <= budget
    assert not callback.run.memory.last_plan.keeps_all


@pytest.mark.parametrize("budget", [TIGHT, LARGE])
def test_a_step_that_needs_values_is_tried(plain, budget):
    callback = CTDRCallback(budget, rank=None)
    found = trained(callback, kind="values")
    agree(found, plain)
    assert any("not made" in event for event in events_of(callback)) == (budget == TIGHT)
    assert max(found[2].bytes[1:]) <= budget


def test_outputs_that_outlive_the_step_are_made(plain):
    callback = Keeps(LARGE - 230 * MIB, rank=None)
    found = trained(callback, kind="returned")
    agree(found, plain)
    assert callback.seen.shape == (BATCH, LENGTH, WORDS)
    assert callback.seen.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param("if_needed", marks=pytest.mark.slow), None])
def test_a_metric_that_wants_probabilities_makes_logits_that_the_loss_does_not_use(rank):
    wanted = trained(kind="metric")
    callback = CTDRCallback(TIGHT + 50 * MIB, rank=rank)
    found = trained(callback, kind="metric")
    agree(found, wanted)
    assert float(found[0].metric.compute()) == pytest.approx(float(wanted[0].metric.compute()), rel=1e-5)
    assert max(found[2].bytes[1:]) < 0.9 * max(wanted[2].bytes)
    assert callback.run.memory.planner.lean_step.names == ("head",)
    assert any("made for softmax" in event for event in events_of(callback))


@pytest.mark.slow
def test_a_loss_that_needs_logits_has_them():
    wanted = trained(kind="z-loss")
    callback = CTDRCallback(LARGE - 100 * MIB, rank=None)
    found = trained(callback, kind="z-loss")
    assert torch.equal(found[1], wanted[1])
    assert not any("not made" in event for event in events_of(callback))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_accumulation_and_autocast(options):
    wanted = trained(**options)
    found = trained(CTDRCallback(TIGHT, rank=None), **options)
    assert torch.allclose(found[1], wanted[1], rtol=0, atol=2e-3 if "precision" in options else 1e-5)
    assert max(found[2].bytes) <= TIGHT


def test_parts_begin_where_leaving_out_ends(plain):
    callback = CTDRCallback(TIGHT, rank=None, memory={"sub_batches": "auto"})
    found = trained(callback)
    assert torch.allclose(found[1], plain[1], rtol=0, atol=1e-5)
    assert not any("sub-batches" in event for event in events_of(callback))
