"""Copies that would put a failed step back are bytes like any others: planned for, held under the budget, logged."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.units import MIB
from ctdr_lightning.trainer.groups import grouped
from tests import parts
from tests.trainer.training_step.test_whole_batch import TruePeak

WIDTH, ROWS, TABLES = 128, 2048, 48


class WithTables(LightningModule):
    """Activations of 1 MiB each, and 6 MiB of small buffers, each of which is copied before each step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        for i in range(TABLES):
            self.register_buffer(f"table{i}", torch.zeros(2**15))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(budget, **options):
    """The allocator's peak of a later batch, what was logged, and the callback."""
    torch.manual_seed(0)
    callback, peak = CTDRCallback(rank=None, memory_budget=budget, verbose=False, **grouped(options)), TruePeak()
    data = DataLoader(TensorDataset(torch.randn(6 * ROWS, WIDTH)), ROWS), None
    trainer = parts.fit(WithTables(), callback, peak, data=data, max_epochs=1)
    return peak.use.peak_bytes, trainer.callback_metrics, callback


@pytest.mark.parametrize("budget_mib", [25, 23])
def test_a_budget_holds_with_the_copies(budget_mib):
    true_bytes, logged, callback = fit(f"{budget_mib}MiB")
    assert true_bytes <= budget_mib * MIB
    plan = callback.run.memory.session.plan
    assert not plan.keeps_all, "the budget asks for nothing"
    copies_bytes = TABLES * 2**17
    without = plan.peak_bytes - copies_bytes
    assert true_bytes > without, "as if there were no copies"
    assert logged["ctdr/peak_memory_gib"].item() * 2**30 == pytest.approx(true_bytes, rel=0.02)
    # an eighth of the copies is kept as room
    assert true_bytes <= plan.peak_bytes <= true_bytes * 1.02 + copies_bytes / 8


def test_without_retries_there_are_no_copies():
    true_bytes, logged, callback = fit("27MiB", retry_on_oom=False)
    assert true_bytes == pytest.approx(callback.run.memory.session.plan.peak_bytes, rel=0.02)
    assert logged["ctdr/peak_memory_gib"].item() * 2**30 == pytest.approx(true_bytes, rel=0.02)
