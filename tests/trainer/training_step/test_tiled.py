"""A network under a budget that its widest modules break, whole: they run in tiles, and nothing else changes."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB
from tests.trainer.training_step.runs import events_of, one_epoch

WIDTH, LENGTH, HIDDEN = 16, 1024, 1024
# One hidden layer takes 4 MiB, and at least 12.7 MiB are needed under a plan of the whole.
TIGHT, LARGE = 12 * MIB, 300 * MIB


class Centred(nn.Sequential):
    """Its tokens mix, which only a trial shows: its parts act on each alone."""

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


class Wide(LightningModule):
    """One sample a batch, and by default a BatchNorm, either of which keeps it from running in parts."""

    def __init__(self, block=nn.Sequential, norm=nn.BatchNorm1d, dropout=0.0):
        super().__init__()
        self.losses = []
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), norm(LENGTH) if norm is nn.BatchNorm1d else norm(WIDTH)
        self.blocks = nn.ModuleList(
            block(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        h = self.norm(self.first(x))
        for block in self.blocks:
            h = h + block(h)
        loss = (self.head(h).mean(1) - 1).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(*callbacks, **parts):
    torch.manual_seed(0)
    module = Wide(**parts)
    data = DataLoader(TensorDataset(torch.randn(6, LENGTH, WIDTH)), 1)
    return one_epoch(module, data, *callbacks)


@pytest.fixture(scope="module")
def plain():
    return trained()


def agree(found, wanted):
    assert torch.allclose(found[1], wanted[1], rtol=0, atol=1e-5)
    for mine, theirs in zip(found[0].parameters(), wanted[0].parameters(), strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rank": None}, {}], ids=["no ranks", "the budget alone"])
def test_a_budget_that_no_plan_of_the_whole_keeps(plain, options):
    callback = CTDRCallback(memory_budget=TIGHT, verbose=False, **options)
    found = trained(callback)
    agree(found, plain)
    assert dict(callback.run.memory.planner.lean_step.tiles) == {"blocks.0": 4, "blocks.1": 4}
    assert any("blocks.0 and 1 other module run in 4 tiles each" in words for words in events_of(callback))
    assert max(found[2].bytes[1:]) <= TIGHT
    assert not any("differ" in words.lower() for words in events_of(callback))
    assert "forward" not in vars(found[0].blocks[0])


@pytest.mark.slow
def test_dropout_inside_draws_the_numbers_of_the_plain_run():
    wanted = trained(dropout=0.2)
    callback = CTDRCallback(memory_budget=TIGHT, rank=None, verbose=False)
    found = trained(callback, dropout=0.2)
    agree(found, wanted)
    assert max(found[2].bytes[1:]) <= TIGHT
    (lean,) = [line for line in callback.run.memory.last_plan.explain().splitlines() if "tiles" in line]
    assert lean.startswith("blocks.0 and 1 other module run in 4 tiles each")


def test_modules_run_whole_where_they_fit(plain):
    callback = CTDRCallback(memory_budget=LARGE, rank=None, verbose=False)
    agree(trained(callback), plain)
    assert callback.run.memory.planner.lean_step.tiles == {}


@pytest.mark.slow
def test_rounding_may_be_forbidden():
    with pytest.raises(InfeasibleBudgetError, match="rounding=True"):
        trained(CTDRCallback(memory_budget=TIGHT, rank=None, memory={"rounding": False}, verbose=False))


@pytest.mark.slow
def test_modules_whose_tokens_mix_run_whole_and_the_run_says_so():
    wanted = trained(block=Centred)
    callback = CTDRCallback(memory_budget=TIGHT, rank=None, memory={"over_budget": "least"}, verbose=False)
    with pytest.warns(UserWarning, match="with the smallest plan found"):
        found = trained(callback, block=Centred)
    agree(found, wanted)
    assert any("blocks.0 was to run in tiles, and runs whole: it gives other" in words for words in events_of(callback))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rank": None}, {}], ids=["no ranks", "the budget alone"])
def test_a_batch_of_one_sample_cannot_run_in_parts(options):
    wanted = trained(norm=nn.LayerNorm)
    callback = CTDRCallback(memory_budget=TIGHT, verbose=False, **options)
    found = trained(callback, norm=nn.LayerNorm)
    agree(found, wanted)
    assert callback.run.memory.planner.lean_step.tiles
    assert max(found[2].bytes[1:]) <= TIGHT
