"""A choice for a budget that the logits of a language model break."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning import BudgetFit, LazyHeads, Tape, fit_to_budget
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB
from ctdr_lightning.joint import pricing
from ctdr_lightning.memory.values.live_bytes import PeakMeter

WORDS = 4000


def language_model():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return nn.Sequential(nn.Embedding(WORDS, 32), block, nn.Linear(32, WORDS))


def step(net, tokens):
    return F.cross_entropy(net(tokens).transpose(1, 2), tokens)


def batches():
    torch.manual_seed(1)
    return [torch.randint(WORDS, (4, 256)) for _ in range(2)]


@pytest.mark.slow
def test_the_dense_model_without_logits_is_the_answer():
    net, data = language_model(), batches()
    fit = fit_to_budget(net, step, data, 32 * MIB, prefer_dense=True, progress=False)
    assert fit.is_dense
    assert fit.leaving_out == ("2",)
    assert fit.plan.keeps_all
    assert "do without the outputs of 2" in str(fit)
    assert BudgetFit.from_json(fit.to_json()).leaving_out == ("2",)
    assert "forward" not in vars(net[2])

    standing = sum(p.nbytes for p in net.parameters()) + data[0].nbytes
    with PeakMeter() as meter, LazyHeads(net, fit.leaving_out), Tape(fit.plan):
        loss = step(net, data[0])
    with meter:
        loss.backward()
    adam = 2 * sum(p.nbytes for p in net.parameters())
    assert standing + adam + meter.live.peak <= 32 * MIB


def test_a_long_step_that_does_not_run_on_fakes_runs_once_with_its_logits_and_once_without(monkeypatch):
    monkeypatch.setattr(pricing, "_LONG_S", 0.0)
    net, runs = language_model(), []

    def reads(model, tokens):
        assert tokens.data_ptr()  # fake tensors have no memory
        runs.append(model)
        return step(model, tokens)

    fit = fit_to_budget(net, reads, batches(), 32 * MIB, prefer_dense=True, progress=False)
    assert fit.leaving_out == ("2",)
    assert fit.is_dense
    assert [model is net for model in runs] == [True, True]


def test_a_long_step_that_reads_values_runs_once(monkeypatch):
    monkeypatch.setattr(pricing, "_LONG_S", 0.0)
    net, runs = language_model(), []

    def reads(model, tokens):
        runs.append(model)
        loss = step(model, tokens[: tokens.shape[0] if tokens.sum().item() > 0 else 1])
        assert f"{loss:.2f}" != "nan"
        return loss

    fit = fit_to_budget(net, reads, batches(), 32 * MIB, prefer_dense=True, progress=False)
    assert fit.leaving_out == ("2",)
    assert fit.is_dense
    assert sum(model is net for model in runs) == 1


def test_logits_are_made_where_they_fit():
    fit = fit_to_budget(language_model(), step, batches(), 200 * MIB, prefer_dense=True, progress=False)
    assert fit.leaving_out == ()


@pytest.mark.slow
def test_logits_are_made_where_rounding_is_forbidden():
    with pytest.raises(InfeasibleBudgetError, match="No ranks and plan fit"):
        fit_to_budget(language_model(), step, batches(), 32 * MIB, rounding=False, progress=False)
