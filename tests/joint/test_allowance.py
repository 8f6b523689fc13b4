"""What ranks may cost: a divergence, or a drop of a metric, of refined factors."""

import math
from types import SimpleNamespace

import pytest

from ctdr_lightning.decomposition.choose.by_share import Start
from ctdr_lightning.decomposition.trials import bench as trials
from ctdr_lightning.joint.allowance import AllowedDrop, AllowedLoss


class Bench:
    """Trials whose metric is one less their divergence; a refinement leaves a share of the divergence."""

    def __init__(self, most, left=0.25):
        self.measured, self.left = [], left
        judged = SimpleNamespace(name="score", drop=lambda value: 1.0 - value)
        self.allowed = AllowedDrop(most, self.refined, judged, self.value)

    def trial(self, divergence):
        return trials.Trial(None, Start(), divergence, {}, {})

    def refined(self, trial):
        return self.trial(self.left * trial.divergence)

    def value(self, trial):
        self.measured.append(trial.divergence)
        return 1.0 - trial.divergence


def test_a_trial_passes_where_its_refined_metric_does():
    bench = Bench(most=0.1)
    settled = bench.allowed.settled(bench.trial(0.3))
    assert settled.outcome == ""
    assert settled.metric == pytest.approx(0.925)
    assert settled.trial.divergence == pytest.approx(0.075)
    over = Bench(most=0.05).allowed.settled(bench.trial(0.3))
    assert "score is worse by 0.075, over 0.05, refined too" in over.outcome


def test_what_is_known_from_other_outputs_is_not_measured_again():
    bench = Bench(most=0.1)
    assert not bench.allowed.excludes(bench.trial(0.2))  # refined it may be at 0.05
    assert bench.allowed.excludes(bench.trial(0.6))  # and this one at 0.15
    assert not bench.allowed.excludes(bench.trial(0.05))
    assert bench.measured == [0.2, 0.6, 0.05]
    for far, excluded in ((0.2, False), (0.7, True), (0.01, False), (math.inf, True), (math.nan, True)):
        assert bench.allowed.excludes(bench.trial(far)) is excluded
    assert bench.measured == [0.2, 0.6, 0.05]


def test_what_a_refinement_won_bounds_what_the_next_may_win():
    bench = Bench(most=0.1, left=0.8)
    assert bench.allowed.remedy() == ""
    assert bench.allowed.refusal(bench.trial(0.3)) == ""
    assert bench.allowed.settled(bench.trial(0.2)).outcome  # a fifth is won, so that three tenths may be
    assert bench.allowed.refusal(bench.trial(0.3)) == "score is worse by over 0.1"
    assert bench.allowed.refusal(bench.trial(0.14)) == ""
    assert "The least drop of score of a candidate that fits the memory is 0.16: write" in bench.allowed.remedy()


def trial(divergence):
    return trials.Trial(None, Start(), divergence, {}, {})


def halved(found):
    return trial(found.divergence / 2)


def test_a_loss_that_is_allowed_is_not_refined_and_a_larger_one_is():
    allowed = AllowedLoss(lambda: 0.1, halved)
    near, far = trial(0.1), trial(0.15)
    assert allowed.settled(near).trial is near
    settled = allowed.settled(far)
    assert (settled.trial.divergence, settled.outcome) == (0.075, "")


def test_a_loss_that_refinement_cannot_be_expected_to_mend_is_refused_and_named():
    allowed = AllowedLoss(lambda: 0.1, halved)
    assert allowed.remedy() == ""
    assert allowed.refusal(trial(0.3)) == ""  # up to four times what is allowed
    assert allowed.refusal(trial(0.5)) == "its loss is over 0.1"
    assert "refined too" in allowed.settled(trial(0.3)).outcome
    assert allowed.refusal(trial(0.3)) == "its loss is over 0.1"  # a half is all that a refinement wins here
    assert "is 0.15: write max_loss=0.158." in allowed.remedy()


def test_without_a_limit_any_loss_is_allowed():
    allowed = AllowedLoss(lambda: None, halved)
    assert not allowed.excludes(trial(1e9))
    assert allowed.settled(trial(1e9)).outcome == ""


def test_a_refined_trial_has_nothing_more_to_win():
    loss = AllowedLoss(lambda: 0.1, lambda trial: trial)
    once = trials.Trial(None, Start(), 0.3, {}, {})
    again = trials.Trial(None, Start(), 0.3, {}, {}, refined=True)
    assert not loss.excludes(once)
    assert loss.excludes(again)
    assert loss.settled(again).outcome
    assert not loss.excludes(once), "no gain was seen"
    drop = Bench(most=0.1).allowed
    assert not drop.excludes(trials.Trial(None, Start(), 0.2, {}, {}))
    assert drop.excludes(trials.Trial(None, Start(), 0.2, {}, {}, refined=True))
