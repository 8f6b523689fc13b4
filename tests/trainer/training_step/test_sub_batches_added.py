"""Batches in parts under accumulation: the sums of the plain run, at a later batch too, in a budget that holds."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.reports.event_words import words_of
from tests import parts
from tests.trainer.accuracy.test_if_needed import Sorter, callback, n_factorized, refused, sort
from tests.trainer.training_step.test_sub_batches import (
    DOUBLE,
    SINGLE,
    WIDTH,
    Deep,
    RunsOut,
    RunsOutInBackward,
    data,
    equal,
    fit,
    losses,
)
from tests.trainer.true_peaks import Peaks

# Of weights after some steps, as in the tests without accumulation.
WEIGHTS = 1e-9
IN_TWO = "Batches of 1024 samples run as 2 sub-batches of 512 or less."


def five():
    """Batches of 10, 10, 10, 10 and 7: a last window that is shorter, whether two or three batches are added up."""
    return data(47, 10)


def same_run(plain, cut):
    equal(plain.gradients, cut.gradients, DOUBLE)
    equal(losses(plain), losses(cut), DOUBLE)
    equal([list(plain.module.parameters())], [list(cut.module.parameters())], WEIGHTS)
    assert plain.trainer.global_step == cut.trainer.global_step


@pytest.mark.parametrize("budget", [None, "64MiB"])
@pytest.mark.parametrize(("n_batches", "number"), [(2, 2), (2, 4), (3, 2), (3, 3)])
def test_gradients_losses_and_weights_are_those_of_whole_batches(n_batches, number, budget):
    options = {"precision": "64-true", "accumulate_grad_batches": n_batches}
    plain = fit(Deep(torch.optim.SGD), loader=five(), **options)
    cut = fit(Deep(torch.optim.SGD), loader=five(), sub_batches=number, memory_budget=budget, **options)
    same_run(plain, cut)
    assert len(plain.gradients) == 10
    assert cut.module.calls == 10 * number


def test_another_number_of_batches_in_each_epoch():
    added = {0: 1, 1: 3, 2: 2}
    options = {"precision": "64-true", "max_epochs": 3}
    plain = fit(Deep(torch.optim.SGD), GradientAccumulationScheduler(added), loader=five(), **options)
    scheduler = GradientAccumulationScheduler(added)
    cut = fit(Deep(torch.optim.SGD), scheduler, loader=five(), sub_batches=2, memory_budget="64MiB", **options)
    same_run(plain, cut)


def test_clipping_and_a_scaled_loss():
    def plugin():
        return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "max_epochs": 1}
    plain = fit(Deep(torch.optim.SGD), plugins=[plugin()], loader=five(), **options)
    cut = fit(Deep(torch.optim.SGD), plugins=[plugin()], loader=five(), sub_batches=3, **options)
    equal(plain.gradients, cut.gradients, 0.02)


class Skips(Deep):
    """No loss for some batches, or for some of their parts.

    Args:
        skips: From the index of the batch and the number of samples to whether there is none.
    """

    def __init__(self, skips):
        super().__init__(torch.optim.SGD)
        self.skips = skips

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if self.skips(index, len(batch[0])) else loss


@pytest.mark.parametrize(
    ("batch", "least"),
    [
        pytest.param(0, 0, id="the first of a window"),
        pytest.param(0, 5, id="its later part"),
        pytest.param(1, 0, id="a later one"),
        pytest.param(4, 5, id="the later part of the last one, alone in its window"),
    ],
)
def test_a_batch_without_a_loss_leaves_the_sums_alone(batch, least):
    """Parts have 6 and 5 samples, of the last batch 4 and 3."""
    options = {"precision": "64-true", "accumulate_grad_batches": 2, "loader": data(51, 11), "max_epochs": 1}
    part = {0: 5, 4: 3}[batch] if least else None
    plain = fit(Skips(lambda index, n: index == batch), **options)
    cut = fit(Skips(lambda index, n: index == batch and part in (None, n)), sub_batches=2, **options)
    equal(plain.gradients, cut.gradients, DOUBLE)
    equal([list(plain.module.parameters())], [list(cut.module.parameters())], WEIGHTS)
    assert len(cut.gradients) == 4


def test_a_batch_whose_part_has_no_loss_is_skipped_where_none_before_it_had_one():
    options = {"precision": "64-true", "accumulate_grad_batches": 3, "loader": data(44, 11), "max_epochs": 1}
    plain = fit(Skips(lambda index, n: index < 2), **options)
    cut = fit(Skips(lambda index, n: index == 0 or (index == 1 and n == 5)), sub_batches=2, **options)
    equal(plain.gradients, cut.gradients, DOUBLE)
    equal([list(plain.module.parameters())], [list(cut.module.parameters())], WEIGHTS)


def test_parts_that_were_added_to_other_batches_are_not_taken_out():
    module = Skips(lambda index, n: index == 1 and n == 5)
    with pytest.raises(ConfigError, match=r"no loss for sub-batch 2 of a batch whose.*\nHINT: Return None for all"):
        fit(module, sub_batches=2, accumulate_grad_batches=2, loader=data(22, 11), max_epochs=1)


def three_parts(module):
    """Three batches in three parts each, the first two added up; activations are most, so that plans are soon found."""
    loader = data(9000, 3000)
    return fit(
        module, sub_batches=3, memory_budget="64MiB", loader=loader, max_epochs=1, accumulate_grad_batches=2,
    )  # fmt: skip


@pytest.mark.parametrize("at", [2, 4, 6, 7])
def test_a_part_that_runs_out_of_memory_finds_the_sums_as_they_were(at):
    """A later part of the first batch, the first and the last one of the second, and the first one of a new window."""
    plain, cut = three_parts(RunsOut(0)), three_parts(RunsOut(at))
    assert RunsOut.failed == 1
    assert parts.same(plain.module.state_dict(), cut.module.state_dict())
    for sums in zip(plain.gradients, cut.gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))
    assert plain.trainer.callback_metrics["loss"] == cut.trainer.callback_metrics["loss"]


@pytest.mark.slow
def test_a_backward_that_adds_to_sums_is_not_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the account of the failed run is written
    plain, cut = three_parts(RunsOutInBackward(0)), three_parts(RunsOutInBackward(7))
    assert RunsOutInBackward.failed == 1
    assert parts.same(plain.module.state_dict(), cut.module.state_dict())
    with pytest.raises(torch.OutOfMemoryError, match="cannot be retried"):
        three_parts(RunsOutInBackward(4))


class Heavy(Deep):
    """Gradients of half a MiB count beside a batch of 1,024 samples."""

    def __init__(self, make=torch.optim.SGD):
        super().__init__(make)
        layers = [part for _ in range(2) for part in (nn.Linear(256, 256), nn.GELU())]
        self.net = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), *layers, nn.Linear(256, 4))


def under(budget, n_batches, *others, make=torch.optim.SGD, epochs=1):
    """A run of five batches, cut where the budget needs it, which holds. Returns it, and the events that say so."""
    peaks, loader = Peaks(), data(5 * 1024, 1024)
    options = {"loader": loader, "max_epochs": epochs, "accumulate_grad_batches": n_batches}
    cut = fit(Heavy(make), peaks, *others, memory_budget=budget, sub_batches="auto", **options)
    memory = cut.callback.run.memory
    planned = max(memory.rest_peak_bytes, *(plan.peak_bytes for plan in memory.session.plans))
    assert max(*peaks.bytes, planned) <= memory.budget_bytes
    return cut, [said for said in map(words_of, memory.session.events) if "sub-batches" in said]


def test_the_budget_holds_with_the_sums():
    cut, said = under("4.9MiB", 2, make=torch.optim.Adam)
    assert said
    plain = fit(Heavy(torch.optim.Adam), loader=data(5 * 1024, 1024), max_epochs=1, accumulate_grad_batches=2)
    equal(plain.gradients[:2], cut.gradients[:2], SINGLE)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "whole", "added"), [("4.85MiB", 0, 1), ("3.4MiB", 1, 1)])
def test_the_sums_count_once(budget, whole, added):
    """A whole batch needs 4.63 MiB, with the sums of other batches 4.94; two parts, which add anyway, 3.30."""
    assert under(budget, 1)[1] == [IN_TWO] * whole
    assert under(budget, 2)[1] == [IN_TWO] * added


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*smallest plan found")
def test_parts_without_a_plan_become_smaller(monkeypatch):
    """Two parts need 3.3 MiB, which a prediction that is a tenth too small does not see."""
    monkeypatch.setattr("ctdr_lightning.trainer.training_step.sub_batches.peaks._ROOM", 0.9)
    peaks, options = Peaks(), {"loader": data(5 * 1024, 1024), "max_epochs": 1}
    plain = fit(Heavy(), **options)
    cut = fit(Heavy(), peaks, memory_budget="3.1MiB", sub_batches="auto", **options)
    memory = cut.callback.run.memory
    said = [words_of(event) for event in memory.session.events]
    in_three = "Batches of 1024 samples run as 3 sub-batches of 342 or less."
    assert [text for text in said if "sub-batches" in text] == [IN_TWO, in_three]
    assert max(peaks.bytes[1:]) <= memory.budget_bytes, "all but the batch that showed it"
    assert max(plan.peak_bytes for plan in memory.session.plans) <= memory.budget_bytes
    equal(plain.gradients, cut.gradients, SINGLE)


@pytest.mark.slow
def test_an_epoch_that_begins_to_accumulate_runs_in_parts():
    """The whole batch fits in the epochs before it."""
    cut, said = under("4.85MiB", 1, GradientAccumulationScheduler({0: 1, 1: 2}), epochs=2)
    assert said == [IN_TWO]
    assert cut.module.calls == 5 + 2 * 5


@pytest.mark.slow
@pytest.mark.parametrize("n_batches", [2, 3])
def test_a_budget_alone_has_batches_run_in_parts(n_batches):
    """It cut layers, or refused the budget, where an accumulation forbade parts."""
    options = {"accumulate_grad_batches": n_batches, "max_epochs": 2}
    plain, chosen, made, peaks = Sorter(), Sorter(), callback(round(0.6 * refused(Sorter()))), Peaks()
    sort(plain, CTDRCallback(rank=None, policy="keep", verbose=False), **options)
    sort(chosen, made, peaks, **options)
    assert n_factorized(chosen) == 0
    assert any("sub-batches" in words_of(event) for event in made.run.memory.session.events)
    for name, weight in chosen.state_dict().items():
        assert torch.allclose(weight, plain.state_dict()[name], rtol=1e-4, atol=1e-6), name
    assert max(peaks.bytes[1:]) <= made.run.memory.budget_bytes
