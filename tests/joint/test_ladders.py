"""What a share buys, and in which ways its errors are judged."""

from dataclasses import dataclass, field, replace

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.by_share import Start
from ctdr_lightning.decomposition.choose.choices import Choices, LayerChoice
from ctdr_lightning.decomposition.trials.bench import Trial
from ctdr_lightning.joint.ladders import Ladders

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
