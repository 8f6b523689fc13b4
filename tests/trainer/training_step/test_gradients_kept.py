"""Gradients of the last step: freed before the forward where the plan needs their bytes, never where they are read."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback, Memory
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.reports.event_words import words_of
from ctdr_lightning.trainer.training_step.optimizer.gradient_readers import gradient_reader
from tests import parts
from tests.trainer.true_peaks import Peaks

WIDTH = 256
seen = []


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Reads(Plain):
    def training_step(self, batch, index):
        self.note()
        return super().training_step(batch, index)

    def note(self):
        seen.append(any(p.grad is not None for p in self.parameters()))


class ReadsUnseen(Plain):
    """Reads them where no code of the class says so."""

    def training_step(self, batch, index):
        seen.append(any(getattr(p, "gr" + "ad") is not None for p in self.parameters()))
        return super().training_step(batch, index)


class Fills(Plain):
    """Its gradients stay for good, so that each backward adds to them."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class Watches(Callback):
    def on_before_zero_grad(self, trainer, module, optimizer):
        seen.append(any(p.grad is not None for p in module.parameters()))


def fit(module, budget, *callbacks, batch=256, **options):
    seen.clear()
    data = DataLoader(TensorDataset(torch.randn(4 * batch, WIDTH)), batch), None
    callback = CTDRCallback(rank=None, memory_budget=budget, verbose=False, **grouped(options))
    parts.fit(module, callback, *callbacks, data=data, max_epochs=1)
    return [words_of(event) for event in callback.run.memory.session.events]


# weights 1.5 MiB, gradients as much, a batch of 0.25 MiB, six outputs of as much: gradients are most of the forward
TIGHT, ROOMY = "4.4MiB", "64MiB"


def test_they_are_freed_early_only_where_the_plan_needs_their_bytes():
    assert any("freed before the forward" in event for event in fit(ReadsUnseen(), TIGHT))
    assert seen == [False] * 4
    assert not any("freed before" in event for event in fit(ReadsUnseen(), ROOMY))
    assert seen == [False, True, True, True]


@pytest.mark.parametrize(
    ("kind", "callbacks", "named"), [(Reads, [], "Reads.note"), (Plain, [Watches], "Watches.on_be")]
)
def test_where_code_reads_them_they_are_kept_and_counted(kind, callbacks, named):
    events = fit(kind(), TIGHT, *[make() for make in callbacks])
    assert any(named in event for event in events)
    assert not any("freed before" in event for event in events)
    assert seen == [False, True, True, True]


def test_where_they_are_filled_with_zeros_they_are_counted_in_the_backward_too():
    watch = Peaks()
    fit(Fills(), "5.3MiB", watch)
    assert len(watch.bytes) == 4
    assert max(watch.bytes) <= 5.3 * 2**20


def test_the_option_says_it_for_good():
    fit(ReadsUnseen(), TIGHT, keep_gradients=True)
    assert seen == [False, True, True, True]
    fit(Reads(), TIGHT, keep_gradients=False)
    assert seen == [False] * 4
    with pytest.raises(ConfigError, match="keep_gradients"):
        CTDRCallback(memory=Memory(keep_gradients="yes"))


class Differentiates(nn.Module):
    def forward(self, x):
        return torch.autograd.grad(x.sum(), x)[0]


def test_readers_are_told_by_their_code():
    assert gradient_reader(Reads()) == "Reads.note"
    assert not gradient_reader(Plain())
    assert not gradient_reader(Differentiates())
    assert gradient_reader(nn.Sequential(Plain()), [Watches()]) == "Watches.on_before_zero_grad"


@pytest.mark.slow
def test_a_longer_batch_in_mid_epoch_is_run_small_or_refused_as_asked():
    class Lengths(Plain):
        def training_step(self, batch, index):
            return super().training_step(batch, index)

    batches = [[torch.randn(n, WIDTH)] for n in (64, 64, 4096, 64)]

    def run(**options):
        callback = CTDRCallback(rank=None, memory_budget="5MiB", verbose=False, **grouped(options))
        module = Lengths()
        parts.fit(module, callback, data=(DataLoader(batches, batch_size=None), None), max_epochs=2)
        return module

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="with the smallest plan found"):
        small = run()
    torch.manual_seed(0)
    plain = Lengths()
    parts.fit(plain, data=(DataLoader(batches, batch_size=None), None), max_epochs=2)
    assert parts.same(small.state_dict(), plain.state_dict())
    with pytest.raises(InfeasibleBudgetError):
        run(over_budget="raise")
    batches.reverse()
    batches.insert(0, [torch.randn(4096, WIDTH)])
    with pytest.raises(InfeasibleBudgetError):
        run()
    with pytest.raises(ConfigError, match="over_budget"):
        CTDRCallback(memory=Memory(over_budget="never"))
