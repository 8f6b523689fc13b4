"""From a budget to ranks and plan. Limits of time are wide here: which step is faster is the machine's business."""

import json
import re
from dataclasses import replace

import pytest
import torch

from ctdr_lightning import BudgetFit, Tape, decompose, fit_to_budget
from ctdr_lightning.basics.errors import CheckpointError, ConfigError, InfeasibleBudgetError
from ctdr_lightning.decomposition import Bench, Choices, FactorizedLayer, bench_of
from ctdr_lightning.decomposition.choose import batches as choose_batches
from ctdr_lightning.decomposition.choose.choices import LayerChoice
from ctdr_lightning.decomposition.trials import bench
from ctdr_lightning.joint import for_budget, search
from ctdr_lightning.joint.search import JointSearch
from ctdr_lightning.joint.turns import RealStep, Turns
from tests.joint import parts

pytestmark = pytest.mark.usefixtures("short_thoughts")
PATIENT = {"max_slowdown": 50.0, "progress": False}


def n_factorized(net):
    return sum(isinstance(layer, FactorizedLayer) for layer in net.modules())


@pytest.fixture(scope="module")
def bounds():
    """Peak of the dense step, and the least that recomputation alone reaches."""
    wide = fit_to_budget(parts.network(), parts.step, parts.batches(), "1GiB", **PATIENT)
    dense = parts.network()
    least = fit_to_budget(dense, parts.step, parts.batches(), max_loss=0.0, **PATIENT)
    return wide.dense_peak_bytes, least.peak_bytes


def test_where_everything_fits_the_answer_is_the_dense_model_and_says_so():
    net = parts.network()
    fit = fit_to_budget(net, parts.step, parts.batches(), "1GiB", **PATIENT)
    assert fit.is_dense
    assert fit.plan.keeps_all
    assert n_factorized(net) == 0
    assert fit.loss == 0
    assert "the dense model, nothing recomputed" in str(fit)
    for n, said in ((1, ": 1 layer factorized,"), (2, ": 2 layers factorized,")):
        choices = Choices({str(i): LayerChoice("svd", (2,)) for i in range(n)})
        assert said in replace(fit, choices=choices, budget_bytes=0).sentences()[0]


def test_the_dense_step_is_never_too_slow_however_disturbed_the_clock_is(monkeypatch):
    monkeypatch.setattr(search, "in_turns", lambda *_: Turns(0.1, 0.2, 2.0))
    fit = fit_to_budget(parts.network(), parts.step, parts.batches(), "1GiB", progress=False)
    assert fit.is_dense
    assert fit.plan.keeps_all


def test_where_the_dense_model_fits_the_batches_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(bench, "gather", lambda *_: pytest.fail("evidence was gathered"))
    assert fit_to_budget(parts.network(), parts.step, parts.batches(), "1GiB", **PATIENT).is_dense


def test_no_more_batches_are_read_than_are_used(monkeypatch):
    monkeypatch.setattr(choose_batches, "_MOST_ELEMENTS", 10)
    read = iter(parts.batches(4))
    fit_to_budget(parts.network(), parts.step, read, "1GiB", **PATIENT)
    assert len(list(read)) == 3


@pytest.mark.slow
def test_where_recomputation_is_enough_no_layer_is_touched(bounds):
    dense, least = bounds
    net = parts.network()
    fit = fit_to_budget(net, parts.step, parts.batches(), (dense + least) // 2, **PATIENT)
    assert fit.is_dense
    assert not fit.plan.keeps_all
    assert "the dense model, with recomputation" in str(fit)
    assert fit.peak_bytes <= (dense + least) // 2


@pytest.mark.slow
def test_below_that_layers_are_factorized_and_the_true_peak_keeps_to_the_budget(bounds):
    budget = round(0.9 * bounds[1])
    net, data = parts.network(), parts.batches()
    fit = fit_to_budget(net, parts.step, data, budget, **PATIENT)
    assert n_factorized(net) == len(fit.choices.factorized) > 0
    assert fit.parameters_after == sum(p.numel() for p in net.parameters()) < fit.parameters_before
    assert fit.measured_peak_bytes <= fit.peak_bytes * 1.001 <= budget * 1.001
    assert 0 < fit.loss < 1
    step = RealStep(net, lambda: parts.step(net, data[0]), fit.plan)
    assert step.run() == ""
    assert sum(row.is_chosen for row in fit.considered) == 1
    for text in ("layer", "Parameters:", "predicted", "measured", "KL"):
        assert text in str(fit)


@pytest.mark.slow
def test_nothing_of_the_model_moves_but_its_layers(bounds):
    net, data = parts.network(), parts.batches()
    random = torch.get_rng_state()
    weights = {name: p.clone() for name, p in net.named_parameters()}
    fit = fit_to_budget(net, parts.step, data, round(0.9 * bounds[1]), **PATIENT)
    kept = {name: p for name, p in net.named_parameters() if name.split(".")[0] not in fit.choices.factorized}
    assert kept
    assert all(torch.equal(p, weights[name]) for name, p in kept.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in net.parameters())
    assert all(module.training for module in net.modules())


@pytest.mark.slow
def test_an_answer_is_saved_loaded_edited_and_given_back(bounds, tmp_path):
    net, data = parts.network(), parts.batches()
    fit = fit_to_budget(net, parts.step, data, round(0.9 * bounds[1]), **PATIENT)
    fit.to_json(tmp_path / "fit.json")
    again = BudgetFit.from_json(tmp_path / "fit.json")
    assert again.to_json() == fit.to_json()
    assert str(again) == str(fit)
    plain = json.loads(fit.to_json())
    name = next(iter(fit.choices.factorized))
    plain["choices"]["layers"][name] = {"decision": "dense", "reason": "by hand"}
    edited = BudgetFit.from_json(json.dumps(plain))
    other = parts.network()
    given = fit_to_budget(other, parts.step, data, "1GiB", given=edited, **PATIENT)
    assert set(given.choices.factorized) == set(fit.choices.factorized) - {name}
    assert n_factorized(other) == len(fit.choices.factorized) - 1
    decompose(parts.network(), choices=edited.choices, progress=False)
    with Tape(given.plan):
        loss = parts.step(other, data[0])
    loss.backward()


def test_a_damaged_answer_does_not_load():
    net = parts.network()
    plain = json.loads(fit_to_budget(net, parts.step, parts.batches(), "1GiB", **PATIENT).to_json())
    for change in (
        {"seconds": "much"},
        {"choices": {}},
        {"report": {"layers": [{"name": 3}]}},
        {"plan": {}},
        {"more": 1},
    ):
        with pytest.raises(CheckpointError):
            BudgetFit.from_json(json.dumps({**plain, **change}))
    del plain["dense_s"]
    with pytest.raises(CheckpointError):
        BudgetFit.from_json(json.dumps(plain))


@pytest.mark.slow
def test_what_cannot_be_met_names_the_least_peak_and_the_loss_there():
    net = parts.network()
    with pytest.raises(InfeasibleBudgetError, match=r"least peak found is .* KL is") as found:
        fit_to_budget(net, parts.step, parts.batches(), 1000, **PATIENT)
    assert found.value.least_peak_bytes > 1000
    assert n_factorized(net) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("slowdown", "select", "n_ways"), [(50.0, None, 1), (50.0, "11", 1), (1.0, "11", 2)])
def test_each_budget_that_the_error_names_is_enough(slowdown, select, n_ways, monkeypatch):
    monkeypatch.setattr(search, "in_turns", lambda *_: Turns(0.1, 0.1, 1.0))
    given = {"memory_budget": 1000, "max_slowdown": slowdown, "select": select, "progress": False}
    with pytest.raises(InfeasibleBudgetError) as found:
        fit_to_budget(parts.network(), parts.step, parts.batches(), **given)
    named = re.findall(r"to ([\d.]+ \w*B)(?: with max_slowdown ([\d.]+))?", found.value.hint)
    assert len(named) == n_ways  # with the last layer alone no step is faster: more memory, or less with more time
    for budget, longer in named:
        # twice the time, as a step of a few milliseconds is not priced alike in two runs
        enough = {"memory_budget": budget, "max_slowdown": 2 * float(longer) if longer else slowdown}
        fit = fit_to_budget(parts.network(), parts.step, parts.batches(), **{**given, **enough})
        assert fit.peak_bytes <= fit.budget_bytes


@pytest.mark.slow
def test_without_a_budget_the_time_of_the_step_as_it_is_is_named():
    with pytest.raises(InfeasibleBudgetError, match=r"HINT: Raise max_slowdown to [\d.]+\.$") as found:
        fit_to_budget(parts.network(), parts.step, parts.batches(), max_slowdown=0.01, select="11", progress=False)
    longer = 2 * float(re.search(r"max_slowdown to ([\d.]+)\.$", found.value.hint)[1])
    fit_to_budget(parts.network(), parts.step, parts.batches(), max_slowdown=longer, select="11", progress=False)


@pytest.mark.slow
def test_where_a_plan_is_too_slow_the_memory_that_is_enough_is_named_too(bounds, monkeypatch):
    monkeypatch.setattr(search, "in_turns", lambda *_: Turns(0.1, 0.1, 1.0))
    monkeypatch.setattr(search, "MOST_OVERPRICED", 1.0)
    given = {"max_slowdown": 1.0, "select": "11", "progress": False}
    with pytest.raises(InfeasibleBudgetError, match=r"raise max_slowdown to .*, or memory_budget to ") as found:
        fit_to_budget(parts.network(), parts.step, parts.batches(), round(1.05 * bounds[1]), **given)
    budget = re.search(r"memory_budget to ([\d.]+ \w*B)", found.value.hint)[1]
    assert fit_to_budget(parts.network(), parts.step, parts.batches(), budget, **given).is_dense


@pytest.mark.slow
@pytest.mark.parametrize(("share", "ends"), [(1e9, True), (0.0, False)])
def test_a_cut_that_loses_nothing_ends_the_search(bounds, monkeypatch, share, ends):
    tried, trial = [], Bench.trial
    monkeypatch.setattr(Bench, "trial", lambda self, *args: tried.append(args) or trial(self, *args))
    monkeypatch.setattr(for_budget, "_NEGLIGIBLE_SHARE", share)
    monkeypatch.setattr(Bench, "looks_untrained", False)
    monkeypatch.setattr(search, "in_turns", lambda *_: Turns(0.1, 0.1, 1.0))
    fit = fit_to_budget(parts.network(), parts.step, parts.batches(), round(0.97 * bounds[1]), **PATIENT)
    assert not fit.is_dense
    assert (len(tried) == 1) is ends
    assert ({row.resource for row in fit.considered} == {"dense", "seconds"}) is ends


@pytest.mark.slow
@pytest.mark.parametrize(("error", "refused_by"), [(1e9, "clock"), (1e-9, "expected")])
def test_the_clock_decides_on_the_dense_model_where_its_price_may_be_wrong(bounds, monkeypatch, error, refused_by):
    monkeypatch.setattr(search, "in_turns", lambda *_: Turns(0.1, 0.9, 9.0))
    monkeypatch.setattr(search, "MOST_OVERPRICED", error)
    given = {"max_slowdown": 1.25, "select": "11", "progress": False}
    seen = []
    keep = JointSearch.keep
    monkeypatch.setattr(JointSearch, "keep", lambda self, found: seen.append(found.row) or keep(self, found))
    with pytest.raises(InfeasibleBudgetError):
        fit_to_budget(parts.network(), parts.step, parts.batches(), round(1.05 * bounds[1]), **given)
    assert any(refused_by in row.outcome for row in seen if row.resource == "dense")


@pytest.mark.slow
def test_too_little_time_is_said_with_the_time_that_it_takes(bounds):
    dense, least = bounds
    net = parts.network()
    with pytest.raises(InfeasibleBudgetError, match="raise max_slowdown to "):
        fit_to_budget(net, parts.step, parts.batches(), (dense + least) // 2, max_slowdown=1e-6, progress=False)


@pytest.mark.slow
def test_without_a_budget_the_peak_is_least_within_the_loss(bounds):
    net = parts.network()
    fit = fit_to_budget(net, parts.step, parts.batches(), max_loss=10.0, **PATIENT)
    assert fit.loss <= 10.0
    assert fit.budget_bytes == 0
    assert fit.peak_bytes < bounds[1] < bounds[0]


@pytest.mark.slow
def test_only_selected_layers_change():
    net = parts.network()
    fit = fit_to_budget(net, parts.step, parts.batches(), max_loss=10.0, select="!0", **PATIENT)
    assert "0" not in fit.choices.factorized
    assert not isinstance(net[0], FactorizedLayer)


def test_arguments_that_cannot_be_used_are_refused():
    net = parts.network()
    with pytest.raises(ConfigError, match="no batch"):
        fit_to_budget(net, parts.step, [], "1GiB", progress=False)
    with pytest.raises(ConfigError, match="max_slowdown"):
        fit_to_budget(net, parts.step, parts.batches(), "1GiB", max_slowdown=0.0)
    with pytest.raises(ConfigError, match="max_loss"):
        fit_to_budget(net, parts.step, parts.batches(), "1GiB", max_loss=-1.0)


def decided():
    """The network with outputs far enough apart that ranks show in them."""
    net = parts.network()
    with torch.no_grad():
        net[-1].weight.mul_(200)
    return net


@pytest.mark.slow
def test_the_loss_allowed_is_that_of_refined_factors():
    with bench_of(decided(), parts.batches(4), parts.step, progress=False) as own:
        trial = own.best(0.25)
        before, after = trial.divergence, own.refined(trial).divergence
    limit = (before * after) ** 0.5
    assert after < 0.5 * before
    fit = fit_to_budget(decided(), parts.step, parts.batches(4), max_loss=limit, **PATIENT)
    assert fit.loss <= limit
    assert fit.parameters_after < 0.3 * fit.parameters_before  # as they were, ranks half as large would be over it


@pytest.mark.slow
def test_what_loses_too_much_even_refined_is_passed_over(monkeypatch):
    """Refinement wins nothing here: how much it does, and so which candidate it saves, differs with the machine."""
    monkeypatch.setattr(Bench, "refined", lambda _, trial: trial)
    fit = fit_to_budget(decided(), parts.step, parts.batches(4), max_loss=0.002, **PATIENT)
    assert fit.loss <= 0.002
    passed_over = [row for row in fit.considered if "refined too" in row.outcome]
    assert passed_over
    assert all(0.002 < row.loss <= 4 * 0.002 for row in passed_over)
