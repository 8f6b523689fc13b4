"""BatchNorm in sub-batches: gradients of parts normalised by themselves, and running statistics of one batch."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.trainer.training_step.sub_batches import foreseen
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import BY_BATCH, RunningStatistics
from tests.trainer.accuracy.test_if_needed import Sorter, callback, n_factorized, refused, sort
from tests.trainer.training_step.test_sub_batches import DOUBLE, WIDTH, Deep, RunsOut, data, equal, fit
from tests.trainer.true_peaks import Peaks

RATE = 0.01


def norms_of(module):
    return [part for part in module.modules() if isinstance(part, BY_BATCH)]


def deep(momentum=0.1, kind=Deep):
    return kind(torch.optim.SGD, layer=partial(nn.BatchNorm1d, WIDTH, momentum=momentum))


class Twice(Deep):
    """Its layers see each batch twice."""

    def training_step(self, batch, index):
        self.calls += 1
        return F.cross_entropy(self.net(batch[0]) + self.net(-batch[0]), batch[1])


class Again(Deep):
    """Its forward runs again in the backward."""

    def training_step(self, batch, index):
        self.calls += 1
        return F.cross_entropy(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])


def by_hand(module, number, batches):
    """Train on batches in parts, without the callback; returns the gradients of each batch."""
    gradients, optimizer = [], torch.optim.SGD(module.parameters(), lr=RATE)
    for x, y in batches:
        before = copy.deepcopy(norms_of(module))
        means = [[torch.zeros_like(t) for t in (norm.running_mean, norm.running_var)] for norm in before]
        optimizer.zero_grad()
        for rows, classes in zip(x.tensor_split(number), y.tensor_split(number), strict=True):
            for norm in norms_of(module):
                norm.momentum = 1.0  # the running statistics become those of the part
            share = len(rows) / len(x)
            (share * F.cross_entropy(module.net(rows), classes)).backward()
            for norm, sums in zip(norms_of(module), means, strict=True):
                sums[0] += share * norm.running_mean
                sums[1] += share * norm.running_var
        gradients.append([p.grad.clone() for p in module.parameters()])
        optimizer.step()
        for norm, old, (mean, variance) in zip(norms_of(module), before, means, strict=True):
            count = int(old.num_batches_tracked) + 1
            momentum = old.momentum if old.momentum is not None else 1 / count
            norm.running_mean.copy_((1 - momentum) * old.running_mean + momentum * mean)
            norm.running_var.copy_((1 - momentum) * old.running_var + momentum * variance)
            norm.num_batches_tracked.fill_(count)
            norm.momentum = old.momentum
    return gradients


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize(("number", "budget"), [(2, None), (3, None), (3, "64MiB")])
def test_parts_are_normalised_by_themselves_and_counted_as_one_batch(number, budget, momentum):
    """Batches of 10, 10 and 7, whose parts differ in size."""
    wanted, module = deep(momentum).double(), deep(momentum)
    loader = data()
    options = {"precision": "64-true", "sub_batches": number, "batch_norm_in_parts": True}
    seen = fit(module, loader=loader, memory_budget=budget, max_epochs=1, **options)
    gradients = by_hand(wanted, number, [(x.double(), y) for x, y in loader[0]])
    equal(gradients, seen.gradients, DOUBLE)
    for ours, theirs in zip(norms_of(module), norms_of(wanted), strict=True):
        assert ours.momentum == theirs.momentum
        assert ours.num_batches_tracked == theirs.num_batches_tracked == 3
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", [Twice, Again])
def test_forwards_beyond_one_a_batch_are_counted_as_without_parts(kind):
    whole, cut = deep(kind=kind), deep(kind=kind)
    fit(whole, max_epochs=1)
    fit(cut, sub_batches=2, batch_norm_in_parts=True, max_epochs=1)
    counts = {int(norm.num_batches_tracked) for norm in norms_of(whole)}
    assert {norm.momentum for norm in norms_of(cut)} == {0.1}
    assert {int(norm.num_batches_tracked) for norm in norms_of(cut)} == counts


@pytest.mark.slow
@pytest.mark.parametrize("at", [7, 8, 9])
def test_a_part_that_runs_out_of_memory_leaves_the_statistics_alone(at):
    """In the first, second or third part of the third batch."""

    class Normed(RunsOut):
        def __init__(self, at):
            super().__init__(at)
            layers = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())]
            self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    plain, cut = Normed(0), Normed(at)
    options = {"sub_batches": 3, "batch_norm_in_parts": True, "memory_budget": "64MiB", "max_epochs": 1}
    for module in (plain, cut):
        fit(module, loader=data(9000, 3000), **options)
    assert RunsOut.failed == 1
    for ours, theirs in zip(norms_of(cut), norms_of(plain), strict=True):
        assert ours.num_batches_tracked == 3
        assert torch.equal(ours.running_mean, theirs.running_mean)
        assert torch.equal(ours.running_var, theirs.running_var)


def test_an_error_in_a_part_gives_the_layers_their_momentum_back():
    class Fails(Deep):
        def training_step(self, batch, index):
            if self.calls == 4:
                raise RuntimeError("of the user's own")
            return super().training_step(batch, index)

    module = deep(kind=Fails)
    with pytest.raises(RuntimeError, match="of the user's own"):
        fit(module, sub_batches=2, batch_norm_in_parts=True)
    assert {norm.momentum for norm in norms_of(module)} == {0.1}


def test_a_part_has_two_samples_or_more():
    """BatchNorm over features refuses one; batches of 5, 5 and 3 samples."""
    module = deep()
    fit(module, loader=data(13, 5), sub_batches=5, batch_norm_in_parts=True, max_epochs=1)
    assert module.calls == 2 + 2 + 1


class Sets(Callback):
    """Another momentum after the last batch in parts."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for norm in norms_of(pl_module) if batch_idx == 1 else ():
            norm.momentum = 0.5


def test_a_momentum_that_is_set_between_batches_stays():
    """The third batch, of three samples, runs whole."""
    module = deep()
    fit(module, Sets(), loader=data(13, 5), sub_batches=5, batch_norm_in_parts=True, max_epochs=1)
    assert module.calls == 2 + 2 + 1
    assert {norm.momentum for norm in norms_of(module)} == {0.5}


def test_layers_without_running_statistics_are_left_alone():
    net = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4).eval(), nn.InstanceNorm1d(4))
    statistics = RunningStatistics(net, [0.5, 0.5])
    statistics.begin(0)
    assert [layer.momentum for layer in net] == [0.1] * 3
    statistics.ran()
    assert int(net[1].num_batches_tracked) == 0


@pytest.fixture(scope="module")
def least():
    """Of all cuts and plans of the whole batch."""
    return refused(Sorter(norm=nn.BatchNorm1d), batch_norm_in_parts=False)


@pytest.mark.slow
def test_a_budget_alone_has_parts_normalised_by_themselves_before_layers_are_cut(least, caplog):
    chosen, made, peaks = Sorter(norm=nn.BatchNorm1d), callback(round(0.6 * least), verbose=True), Peaks()
    sort(chosen, made, peaks, max_epochs=2)
    assert n_factorized(chosen) == 0
    assert "each of which BatchNorm normalises by itself" in " ".join(caplog.text.split())
    assert max(peaks.bytes[1:]) <= round(0.6 * least)
    assert int(chosen.net[1].num_batches_tracked) == 4


@pytest.mark.parametrize(("samples", "refused"), [(341, False), (342, True)])
def test_unasked_parts_have_a_least_number_of_samples(least, samples, refused, monkeypatch):
    """Three parts fit, of 342, 341 and 341 samples; two do not."""
    monkeypatch.setattr(foreseen, "LEAST_SAMPLES", samples)
    with pytest.raises(InfeasibleBudgetError) if refused else nullcontext():
        sort(Sorter(norm=nn.BatchNorm1d), callback(round(0.6 * least)))
