"""The record of a choice: what it says, its JSON, its table."""

import json
from dataclasses import replace

import pytest

from ctdr_lightning import BudgetFit, fit_to_budget
from ctdr_lightning.basics.errors import CheckpointError
from ctdr_lightning.decomposition import Choices
from ctdr_lightning.joint.budget_fit import MetricChange
from ctdr_lightning.joint.considered import Considered
from tests.joint import parts

pytestmark = pytest.mark.usefixtures("short_thoughts")


@pytest.fixture(scope="module")
def fit():
    return fit_to_budget(parts.network(), parts.step, parts.batches(), "2.6MiB", max_slowdown=50.0, progress=False)


@pytest.mark.slow
def test_its_report_has_a_row_a_layer_with_what_the_plan_does_inside(fit):
    assert [row.name for row in fit.report] == ["0", "3", "7", "11"]
    assert {row.name for row in fit.report.factorized} == set(fit.choices.factorized)
    assert fit.report.parameters_before > fit.report.parameters_after
    saved = sum(row.saved_bytes for row in fit.report)
    assert 0 < saved <= sum(d.n_bytes for d in fit.plan.decisions)
    assert all(row.freed_bytes <= row.saved_bytes for row in fit.report)
    assert all(row.flops_before > 0 and row.relative_error > 0 for row in fit.report.factorized)


def test_it_comes_back_from_json_and_another_version_does_not(fit):
    again = BudgetFit.from_json(fit.to_json())
    assert (again.report, again.considered, again.plan) == (fit.report, fit.considered, fit.plan)
    assert again.choices.same_layers(fit.choices)
    plain = json.loads(fit.to_json())
    with pytest.raises(CheckpointError, match="version"):
        BudgetFit.from_json(json.dumps({**plain, "version": 1}))


def test_its_table_names_bytes_saved_where_there_are_any(fit):
    assert "saved" in str(fit).splitlines()[0]
    bare = replace(fit.report, layers=tuple(replace(row, saved_bytes=0, freed_bytes=0) for row in fit.report))
    assert not {"saved", "freed"} & set(str(replace(fit, report=bare)).splitlines()[0].split())


@pytest.mark.parametrize("untrained", [True, False])
def test_a_cut_of_an_untrained_network_is_named(fit, untrained):
    told = BudgetFit.from_json(replace(fit, untrained=untrained).to_json()).sentences()
    assert any("looks untrained" in text for text in told) == untrained


def test_an_exact_plan_names_neither_parameters_nor_a_cost(fit):
    assert any("Expected cost: KL" in text for text in fit.sentences())
    told = " ".join(replace(fit, choices=Choices({})).sentences())
    assert "Expected cost" not in told
    assert "Parameters" not in told


@pytest.mark.parametrize(("higher", "drop"), [(True, 0.25), (False, -0.25)])
def test_a_metric_falls_or_rises_where_a_model_gets_worse(higher, drop):
    change = MetricChange("score", 1.0, 0.75, 0.5, 1, higher)
    assert change.drop == drop
    assert f"0.7500 chosen on 1 batch: {drop:.4f} worse (0.5 allowed)" in str(change)


def row(share, resource, time, loss, outcome="", seconds=1.0, peak=90):
    return Considered(share, resource, round(1000 * share), 100, peak, seconds, loss, time, outcome)


def test_its_options_are_the_dense_model_the_chosen_one_and_what_none_beats_in_time_and_loss(fit):
    dense, chosen = row(1.0, "dense", 1.4, 0.0), row(0.5, "seconds", 0.9, 0.01, "chosen")
    beaten, untried = row(0.75, "seconds", 1.0, 0.02), row(0.25, "seconds", 0.5, -1.0)
    slower, faster = row(0.75, "parameters", 1.1, 0.002), row(0.25, "parameters", 0.7, 0.3)
    unfit = row(0.33, "parameters", 0.0, 0.001, "no plan goes below 100 B", seconds=0.0)
    found = replace(fit, considered=(dense, beaten, slower, chosen, untried, unfit, faster), dense_s=1.0)
    assert [option.slowdown for option in found.options] == [1.4, 1.1, 0.9, 0.7]
    assert [option.is_chosen for option in found.options] == [False, False, True, False]
    lines = found.table().splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["dense", "75%", ">", "25%"]
    assert lines[2].split() == ["dense", "1,000", "90", "B", "x1.40", "timed", "0"]
    assert lines[4].endswith("x0.90 timed  0.0100")


def test_its_options_are_six_at_most_and_say_what_is_predicted_and_what_no_plan_reaches(fit):
    many = [row(0.5 - i / 100, "seconds", 0.0, 0.01 * i, seconds=0.9 - i / 100) for i in range(1, 9)]
    dense = row(1.0, "dense", 0.0, 0.0, "no plan goes below 500 B", seconds=0.0, peak=500)
    found = replace(fit, considered=(dense, *many, row(0.1, "seconds", 0.3, 0.5, "chosen")), dense_s=1.0)
    assert len(found.options) == 6
    assert (found.options[0].model, found.options[0].slowdown) == ("dense", 0.0)
    assert found.options[-1].is_chosen
    lines = found.table().splitlines()
    assert lines[2].split() == ["dense", "1,000", "at", "least", "500", "B", "0"]
    assert "x0.89 predicted" in lines[3]
