"""What a share buys, and in which ways its errors are judged."""

from dataclasses import dataclass, field, replace

import pytest

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.by_share import Start
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.trials.bench import Trial
from ctdr_lightning.joint.ladders import SHARES, Ladders, shares_within

STARTS = tuple(Start(fisher, covariance) for fisher in (False, True) for covariance in (False, True))


@dataclass
class ToldBench:
    """Choices that tell shares and starts apart; divergences by start."""

    divergences: dict[Start, float]
    starts: tuple[Start, ...] = STARTS
    asked: list[tuple[float, tuple[Start, ...]]] = field(default_factory=list)

    def choices(self, share, resource, start):
        if share < 0.1:
            raise ConfigError("nothing is that cheap", "")
        return Choices({str(start): LayerChoice(method="svd", ranks=(round(100 * share),))})

    def trial(self, choices, start):
        return Trial(choices, start, 9.0, {}, {})

    def trials(self, share, resource, starts, enough):
        self.asked.append((share, tuple(starts)))
        found = [Trial(self.choices(share, resource, s), s, self.divergences[s], {}, {}) for s in starts]
        return sorted(found, key=lambda trial: trial.divergence)


def test_the_first_candidate_is_tried_in_every_way_and_the_others_in_the_two_best():
    bench = ToldBench(dict(zip(STARTS, (3.0, 1.0, 2.0, 4.0), strict=True)))
    ladders = Ladders(bench)
    first = ladders.rung(0.5, "parameters")
    assert first.start == STARTS[3]  # all the evidence there is
    assert ladders.best(first).start == STARTS[1]
    assert ladders.rung(0.5, "parameters").choices == ladders.best(first).choices  # what was tried stands on the rung
    second = ladders.rung(0.25, "parameters")
    assert second.start == STARTS[1]
    ladders.best(second)
    assert ladders.best(second) is ladders.best(second)
    assert [len(starts) for _, starts in bench.asked] == [4, 2]
    assert set(bench.asked[1][1]) == {STARTS[1], STARTS[2]}
    assert ladders.rung(0.05, "parameters") is None


def test_a_hurried_search_tries_one_way():
    bench = ToldBench(dict.fromkeys(STARTS, 1.0))
    ladders = Ladders(bench, hurried=True)
    for share in (0.5, 0.25):
        ladders.best(ladders.rung(share, "parameters"))
    assert [starts for _, starts in bench.asked] == [STARTS[3:], STARTS[3:]]


def test_a_refined_trial_takes_the_place_of_the_one_whose_factors_it_has():
    ladders = Ladders(ToldBench(dict.fromkeys(STARTS, 1.0)))
    rung = ladders.rung(0.5, "parameters")
    tried = ladders.best(rung)
    ladders.keep(rung, replace(tried, layers={"other": None}))
    assert ladders.best(rung) is tried
    refined = replace(tried, divergence=0.5, refined=True)
    ladders.keep(rung, refined)
    assert ladders.best(rung) is refined


def test_the_first_way_is_not_tried_again_with_the_others_and_an_own_trial_is_found_again():
    bench = ToldBench(dict(zip(STARTS, (3.0, 1.0, 2.0, 4.0), strict=True)))
    ladders = Ladders(bench)
    rung = ladders.rung(0.5, "parameters")
    assert ladders.first(rung).divergence == 4.0
    assert ladders.best(rung).divergence == 1.0
    assert ladders.first(rung).divergence == 1.0  # the best so far
    assert [starts for _, starts in bench.asked] == [STARTS[3:], STARTS[2::-1]]
    assert ladders.exact(rung).divergence == 4.0
    assert ladders.exact(ladders.rung(0.25, "parameters")).divergence == 9.0


def test_where_the_first_way_is_enough_no_other_is_tried():
    bench = ToldBench(dict.fromkeys(STARTS, 1.0))
    ladders = Ladders(bench, enough=lambda: 1.0)
    rung = ladders.rung(0.5, "parameters")
    assert ladders.first(rung) is ladders.best(rung)
    assert [starts for _, starts in bench.asked] == [STARTS[3:]]


def looking(peaks, budget):
    """The shares of a ladder whose peaks depend on the share alone, and those that were looked at."""
    looked = []
    return shares_within(peaks(1.0), budget, lambda share: looked.append(share) or peaks(share)), looked


def test_shares_far_above_the_budget_are_passed_over():
    shares, looked = looking(lambda share: 1000 * share, 130)
    assert shares == (0.17, 0.125, 0.0625)
    assert looked == [0.75, 0.17, 0.125]


def test_where_too_much_was_passed_over_the_largest_share_that_fits_is_found():
    shares, looked = looking(lambda share: 1000 * share**3 if share < 0.7 else 1000 * share**0.1, 130)
    assert shares == (0.75, 0.5, 0.33, 0.25, 0.17, 0.125, 0.0625)
    assert set(looked) == {0.75, 0.5, 0.33, 0.25, 0.17, 0.125, 0.0625}


@pytest.mark.parametrize("budget", [None, 2000, 900])
def test_a_ladder_begins_above_where_that_fits(budget):
    shares, looked = looking(lambda share: 1000 * share, budget)
    assert shares == (1.0, *SHARES)
    assert looked == ([0.75] if budget == 900 else [])


def test_peaks_that_do_not_fall_are_looked_at_one_by_one():
    shares, looked = looking(lambda share: 1000, 130)
    assert shares == (0.0625,)  # the one above a ladder's first: nothing is left
    assert looked == [*SHARES]
