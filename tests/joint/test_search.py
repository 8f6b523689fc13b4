"""The order in which candidates are looked at and tried."""

from dataclasses import dataclass, field

import pytest

from ctdr_lightning import fit_to_budget
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.choose.rank_search import Start
from ctdr_lightning.decomposition.trial import Bench, Trial
from ctdr_lightning.joint import pricing, search
from ctdr_lightning.joint.budget_fit import Considered
from ctdr_lightning.joint.proposals import DENSE, Proposer
from ctdr_lightning.joint.search import PricedChoice
from tests.joint import parts

STARTS = tuple(Start(fisher, covariance) for fisher in (False, True) for covariance in (False, True))


@dataclass
class Chooser:
    """Choices that tell shares and starts apart; divergences by start."""

    divergences: dict[Start, float]
    starts: tuple[Start, ...] = STARTS
    asked: list[tuple[float, tuple[Start, ...]]] = field(default_factory=list)

    def proposal(self, share, resource, start):
        if share < 0.1:
            raise ConfigError("nothing is that cheap", "")
        return Choices({str(start): LayerChoice(method="svd", ranks=(round(100 * share),))})

    def trials(self, share, resource, starts):
        self.asked.append((share, tuple(starts)))
        found = [Trial(self.proposal(share, resource, s), s, self.divergences[s], {}, {}) for s in starts]
        return sorted(found, key=lambda trial: trial.divergence)


def at(peak):
    return PricedChoice(DENSE, None, 0, Considered(1.0, "dense", 0, 0, peak, 0.0, 0.0, 0.0, ""))


def test_the_first_candidate_is_tried_in_every_way_and_the_others_in_the_two_best():
    chooser = Chooser(dict(zip(STARTS, (3.0, 1.0, 2.0, 4.0), strict=True)))
    proposer = Proposer(chooser)
    first = proposer.propose(0.5, "parameters")
    assert first.start == STARTS[3]  # all the evidence there is
    assert proposer.best(first).start == STARTS[1]
    assert proposer.propose(0.5, "parameters").choices == proposer.best(first).choices  # what was tried is proposed
    second = proposer.propose(0.25, "parameters")
    assert second.start == STARTS[1]
    proposer.best(second)
    assert proposer.best(second) is proposer.best(second)
    assert [len(starts) for _, starts in chooser.asked] == [4, 2]
    assert set(chooser.asked[1][1]) == {STARTS[1], STARTS[2]}
    assert proposer.propose(0.05, "parameters") is None


def test_a_hurried_search_tries_one_way():
    chooser = Chooser(dict.fromkeys(STARTS, 1.0))
    proposer = Proposer(chooser, hurried=True)
    for share in (0.5, 0.25):
        proposer.best(proposer.propose(share, "parameters"))
    assert [starts for _, starts in chooser.asked] == [STARTS[3:], STARTS[3:]]


def test_a_ladder_is_left_where_peaks_rise_twice_and_goes_on_from_there():
    ladder = iter([at(peak) for peak in (8, 7, 9, 6, 10, 11, 5)])
    assert [found.row.peak_bytes for found in search._while_falling(ladder)] == [8, 7, 9, 6, 10, 11]
    assert [found.row.peak_bytes for found in search._while_falling(ladder)] == [5]
    assert list(search._while_falling(ladder)) == []


@pytest.mark.parametrize("max_loss", [10.0, 1e-9])
def test_without_a_budget_few_candidates_are_tried(monkeypatch, max_loss):
    tried, trial = [], Bench.trial
    monkeypatch.setattr(Bench, "trial", lambda self, *args: tried.append(args) or trial(self, *args))
    for module in (pricing, search):
        monkeypatch.setattr(module, "PLANNING_S", 0.1)
    fit = fit_to_budget(
        parts.network(), parts.step, parts.batches(), max_loss=max_loss, max_slowdown=50.0, progress=False
    )
    assert fit.loss <= max_loss
    assert fit.is_dense == (max_loss < 1e-6)
    assert len(tried) <= 2 + 2 * 2 * 6  # four ways once, then two; six shares a ladder at most
