"""Without ``max_slowdown`` the time is a wish: it gives way before accuracy does, and before there is no answer."""

from itertools import count

import pytest

from ctdr_lightning import fit_to_budget, plan
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.decomposition import Bench, FactorizedLayer
from ctdr_lightning.joint import for_budget, pricing, search, shortfall
from ctdr_lightning.joint.allowance import AllowedLoss
from ctdr_lightning.joint.turns import Turns
from tests.joint import parts

pytestmark = pytest.mark.usefixtures("short_thoughts")


def chosen(budget, **options):
    return fit_to_budget(parts.network(), parts.step, parts.batches(), budget, progress=False, **options)


@pytest.fixture(scope="module")
def bounds():
    """Peak of the dense step, and the least that recomputation alone reaches."""
    least = chosen(None, max_loss=0.0, max_slowdown=50.0)
    return least.dense_peak_bytes, least.peak_bytes


@pytest.fixture
def clock(monkeypatch):
    """Plans of the dense model take twice its step, factorized ones half of it."""

    def in_turns(dense, step):
        cut = any(isinstance(layer, FactorizedLayer) for layer in step.model.modules())
        return Turns(1.0, 0.5, 0.5) if cut else Turns(1.0, 2.0, 2.0)

    monkeypatch.setattr(search, "in_turns", in_turns)


def reason(fit):
    """Why the marked option was chosen, as it is said."""
    found = [option.reason for option in fit.options if option.is_chosen]
    assert [f"Reason: {said}." for said in found] == fit.sentences()[1:2]
    return found[0]


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_a_slow_exact_plan_is_better_than_a_cut_that_loses(bounds, monkeypatch):
    monkeypatch.setattr(for_budget, "USUAL_LOSS", 1e-9)
    fit = chosen(sum(bounds) // 2)
    assert fit.is_dense
    assert fit.measured_slowdown == 2.0
    assert "No cut was found that is faster and as good; max_slowdown= makes the time a limit." in fit.sentences()
    assert reason(fit) == "the dense model fits"


@pytest.mark.usefixtures("clock")
def test_a_fast_cut_that_loses_next_to_nothing_is_better_than_a_slow_exact_plan(bounds, monkeypatch):
    monkeypatch.setattr(for_budget, "USUAL_LOSS", 10.0)
    monkeypatch.setattr(for_budget, "USUAL_SHARE", 1e9)
    monkeypatch.setattr(Bench, "looks_untrained", False)
    fit = chosen(sum(bounds) // 2)
    assert not fit.is_dense
    assert any(said.startswith("Without any cut this budget costs x") for said in fit.sentences())
    assert reason(fit).startswith("the first that fits within x1 of the dense step's time and loses next to nothing, ")


@pytest.mark.exhaustive
def test_where_nothing_fits_within_the_wish_the_time_gives_way_and_not_the_run(bounds, monkeypatch):
    monkeypatch.setattr(search, "in_turns", lambda *_: Turns(1.0, 3.0, 3.0))
    budget = round(0.9 * bounds[1])
    fit = chosen(budget)
    assert not fit.is_dense
    assert fit.peak_bytes <= budget
    assert fit.measured_slowdown == 3.0
    assert any(said.startswith("Without any cut no plan goes below") for said in fit.sentences())
    assert reason(fit) == "the least loss of those looked at whose step fits"
    with pytest.raises(InfeasibleBudgetError, match="within x1 of the dense step's time"):
        chosen(budget, max_slowdown=1.0)


@pytest.mark.slow
def test_what_nothing_fits_is_refused_without_a_word_on_time(monkeypatch):
    thriftiest, n_asked = shortfall.Shortfall._thriftiest, count()

    def interrupted(self, found, seconds):
        """On a slow machine a second search may end with less than the first."""
        return plan(found.trace, policy="keep") if next(n_asked) else thriftiest(self, found, seconds)

    monkeypatch.setattr(shortfall.Shortfall, "_thriftiest", interrupted)
    with pytest.raises(InfeasibleBudgetError, match="No ranks and plan fit 100 B: the least peak found is") as error:
        chosen(100)
    assert "max_slowdown" not in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_no_candidate_is_refined_twice_however_often_the_walk_is_repeated(bounds, monkeypatch):
    monkeypatch.setattr(for_budget, "USUAL_LOSS", 1e-9)
    monkeypatch.setattr(Bench, "looks_untrained", False)  # else no cut is looked at
    asked = []
    refined = Bench.refined

    def counted(bench, trial):
        if not trial.refined:
            asked.append(id(trial.layers))
        return refined(bench, trial)

    monkeypatch.setattr(Bench, "refined", counted)
    monkeypatch.setattr(AllowedLoss, "excludes", lambda *_: False)
    assert chosen(sum(bounds) // 2).is_dense
    assert len(set(asked)) == len(asked) > 0


@pytest.mark.parametrize(("asked", "n_timed"), [({}, 0), ({"max_slowdown": 50.0}, 1)])
def test_a_long_steps_exact_plan_is_timed_only_where_the_time_is_a_limit(bounds, monkeypatch, asked, n_timed):
    runs, watched = [], search.RealStep.watched
    monkeypatch.setattr(pricing, "_LONG_S", 0.0)
    monkeypatch.setattr(pricing.Pricer, "foretells", lambda *_: True)  # predictions come from this machine's clock
    monkeypatch.setattr(search, "in_turns", None)
    monkeypatch.setattr(search.RealStep, "watched", lambda step: runs.append(step) or watched(step))
    fit = chosen(round(0.95 * bounds[0]), prefer_dense=True, **asked)
    assert fit.is_dense
    assert len(runs) == n_timed
    assert (fit.measured_slowdown > 0) is bool(n_timed)


@pytest.mark.slow
def test_a_long_cuts_step_runs_once_for_its_peak_and_its_time(bounds, monkeypatch):
    monkeypatch.setattr(pricing, "_LONG_S", 0.0)
    monkeypatch.setattr(search, "in_turns", None)
    fit = chosen(round(0.9 * bounds[1]), max_slowdown=1e6)
    assert not fit.is_dense
    assert fit.measured_slowdown > 0
    assert 0 < fit.measured_peak_bytes <= fit.budget_bytes
