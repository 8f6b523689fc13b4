"""The order in which candidates are looked at and tried."""

import pytest
import torch

from ctdr_lightning import fit_to_budget
from ctdr_lightning.basics.errors import InfeasibleBudgetError, ReplayError
from ctdr_lightning.decomposition.trials.bench import Bench
from ctdr_lightning.joint import pricing, search
from ctdr_lightning.joint.considered import Considered
from ctdr_lightning.joint.ladders import DENSE
from ctdr_lightning.joint.priced_choice import PricedChoice, while_falling
from tests.joint import parts


def at(peak):
    return PricedChoice(DENSE, None, Considered(1.0, "dense", 0, 0, peak, 0.0, 0.0, 0.0, ""))


def test_a_ladder_is_left_where_peaks_rise_twice_and_goes_on_from_there():
    ladder = iter([at(peak) for peak in (8, 7, 9, 6, 10, 11, 5)])
    assert [found.row.peak_bytes for found in while_falling(ladder)] == [8, 7, 9, 6, 10, 11]
    assert [found.row.peak_bytes for found in while_falling(ladder)] == [5]
    assert list(while_falling(ladder)) == []


@pytest.mark.slow
def test_a_candidate_that_no_plan_brings_within_the_time_is_planned_once_the_time_gives_way(monkeypatch):
    refused = []
    monkeypatch.setattr(pricing, "lower_bound_seconds", lambda step, peak_bytes: refused.append(peak_bytes) or 1e9)
    monkeypatch.setattr(pricing, "PLANNING_S", 0.1)
    net = parts.network()
    dense = fit_to_budget(parts.network(), parts.step, parts.batches(), "1GiB", progress=False)
    budget = int(0.47 * dense.keep_peak_bytes)  # the dense model has no plan for less than half
    fit = fit_to_budget(net, parts.step, parts.batches(), budget, progress=False)
    assert refused
    assert not fit.is_dense
    assert fit.plan.peak_bytes <= budget


@pytest.mark.slow
def test_the_error_names_a_remedy_where_no_candidate_was_planned_for_all_would_have_taken_too_long(monkeypatch):
    monkeypatch.setattr(pricing, "lower_bound_seconds", lambda step, peak_bytes: 1e9)
    monkeypatch.setattr(pricing, "PLANNING_S", 0.1)
    keep_bytes = fit_to_budget(parts.network(), parts.step, parts.batches(), "1GiB", progress=False).keep_peak_bytes
    with pytest.raises(InfeasibleBudgetError, match=r"It fits at x\d|Raise memory_budget to \d"):
        fit_to_budget(
            parts.network(), parts.step, parts.batches(), int(0.47 * keep_bytes), max_slowdown=9.0, progress=False
        )


@pytest.mark.slow
@pytest.mark.parametrize("max_loss", [10.0, 1e-9])
def test_without_a_budget_few_candidates_are_tried(monkeypatch, max_loss):
    tried, trial = [], Bench.trial
    monkeypatch.setattr(Bench, "trial", lambda self, *args: tried.append(args) or trial(self, *args))
    monkeypatch.setattr(pricing, "PLANNING_S", 0.1)
    fit = fit_to_budget(
        parts.network(), parts.step, parts.batches(), max_loss=max_loss, max_slowdown=50.0, progress=False
    )
    assert fit.loss <= max_loss
    assert fit.is_dense == (max_loss < 1e-6)
    reason = next(option.reason for option in fit.options if option.is_chosen)
    rule = (
        "no cut whose loss is allowed has a smaller peak" if fit.is_dense else "of the cuts whose loss is allowed the"
    )
    assert reason.startswith(rule)
    assert reason.endswith(" within x50 of the dense step's time")
    assert len(tried) <= 2 + 2 * 2 * 6  # four ways once, then two; six shares a ladder at most


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), ReplayError("Other bits.", "Hold.")])
def test_a_plan_whose_run_ends_in_an_error_that_training_mends_is_chosen_unmeasured(monkeypatch, error):
    def ends(_):
        raise error

    monkeypatch.setattr(search.RealStep, "watched", ends)
    fit = fit_to_budget(parts.network(), parts.step, parts.batches(), "1GiB", progress=False)
    assert fit.is_dense
    assert (fit.measured_peak_bytes, fit.measured_slowdown) == (0, 0.0)
    assert "predicted, not measured." in str(fit)
    assert "not timed" in str(fit)
