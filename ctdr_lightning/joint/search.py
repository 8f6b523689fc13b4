"""The walk over candidates: shares of two resources, each with its plan, by rising loss to the first that fits.

No published system chooses ranks and recomputation together. Each candidate is priced without being run. Along a ladder
of shares the loss rises: each is walked down to its first candidate that fits. Of these the one of least measured KL is
timed against the dense step in turns; where it is too slow its ladder is walked on. If the time is only wished for, the
walk is repeated: for a harmless loss within the wish, then within a quarter more, then for the dense model at any time,
or else any loss. Without a budget each ladder's smallest share whose loss may be allowed is found by halving; from
there on candidates are planned as long as their peaks fall, and the one of least peak is timed first. The allowed loss
applies to refined factors (`allowance`); only a candidate that would be the answer is refined. Shares whose memory
cannot fit, as far as larger ones foretell it, are passed over; where a bound says that no plan is fast enough, none is
made before the time gives way. Complexity: a fake recording and at most one plan a candidate, factorizations and KLs of
those that fit; without a budget about four factorizations and three plans a ladder.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError, ReplayError
from ctdr_lightning.basics.progress_bar import doing
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.decomposition.choose.by_share import Start
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.trials.bench import Bench, Trial
from ctdr_lightning.joint.allowance import Allowance
from ctdr_lightning.joint.budget_fit import CLOCK_ERROR
from ctdr_lightning.joint.considered import CHOSEN, GIVEN, Considered
from ctdr_lightning.joint.ladders import DENSE, RESOURCES, SHARES, Ladders, Rung, between, shares_within
from ctdr_lightning.joint.priced_choice import Limits, PricedChoice, while_falling
from ctdr_lightning.joint.pricing import MOST_OVERPRICED, Pricer
from ctdr_lightning.joint.shortfall import PREDICTION_ERROR, Shortfall, within
from ctdr_lightning.joint.turns import RealStep, in_turns
from ctdr_lightning.joint.twins import twin_with, unmoved
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

# So much longer than wished a harmless cut may take, and the dense model where it is preferred. Not tuned.
PATIENT = 1.25
_UNKNOWN_LOSS = -1.0

Ordered = tuple[PricedChoice, str]  # and the reason, should it be the answer


class JointSearch:
    """Finds the answer for one model and one set of limits.

    Args:
        bench: Tries ranks on the dense model.
        forward: Gives the loss of a model on the batch that is priced.
        pricer: Prices candidates.
        limits: Limits of the answer's step.
        allowance: The allowed loss of its ranks.
        harmless: Their allowed loss where the dense model fits by a plan that takes longer than wished.
        negligible: A divergence, in nats, below which candidates lose alike; asked for with the first one.
        spare: From a limit of time, in dense steps, to an exact means that keeps the budget in it; empty for none.
        note: Called with each candidate.

    Attributes:
        considered: A row for every candidate, in the order in which they were looked at.
        dense_step: The dense model's step, with all resident bytes; None before it was looked at.
    """

    def __init__(
        self,
        bench: Bench,
        forward: Callable[[nn.Module], Tensor],
        pricer: Pricer,
        limits: Limits,
        allowance: Allowance,
        harmless: Allowance,
        negligible: Callable[[], float] = lambda: 0.0,
        spare: Callable[[float], str] = lambda slowdown: "",
        note: Callable[[], object] = lambda: None,
    ) -> None:
        self._bench, self._model, self._forward = bench, bench.model, forward
        self._pricer, self._note, self._negligible, self._spare = pricer, note, negligible, spare
        self._ladders = Ladders(bench, hurried=pricer.is_long, enough=negligible)
        self._dense = RealStep(self._model, partial(forward, self._model))
        self._limits, self._allowance, self._harmless = limits, allowance, harmless
        self._shortfall = Shortfall(pricer)
        self._seen, self._looked = list[object](), list[PricedChoice]()
        self.considered: dict[tuple[float, str], Considered] = {}
        self.dense_step: Trace | None = None

    def run(self) -> PricedChoice:
        """The answer.

        Raises:
            InfeasibleBudgetError: If nothing keeps to the limits, with the least peak; or if `spare` names a means.
        """
        for slowdown, allowance in self._passes():
            found = self._first(slowdown, allowance)
            if found is not None:
                return self.keep(found)
        raise self._infeasible()

    def _passes(self) -> Iterator[tuple[float, Allowance]]:
        """Limits of time and loss in the order in which they give way: time before accuracy."""
        wish, any_loss, harmless = self._limits.slowdown, self._allowance, self._harmless
        if not self._limits.wished:
            yield wish, any_loss
            return
        yield wish, harmless
        yield wish * PATIENT, harmless
        dense = self.look(DENSE)
        self._ask(dense, math.inf if dense.plan is None else self._pricer.slowdown(self._pricer.seconds(dense.plan)))
        if dense.plan is None and any_loss is not harmless:
            yield wish * PATIENT, any_loss
        yield math.inf, any_loss

    def _ask(self, dense: PricedChoice, slowdown: float) -> None:
        """End the search where a means of the caller's keeps the budget in so many dense steps."""
        if means := self._spare(slowdown):
            cuts = slowdown > self._limits.slowdown and not self._harmless.forbids_cuts
            raise self._shortfall.spared(self._limits, dense, means, cuts=cuts)

    def _first(self, slowdown: float, allowance: Allowance) -> PricedChoice | None:
        """The first candidate within a time and an allowed loss, with the reason; None if there is none."""
        self._relax(slowdown)
        self._allowance = allowance
        dense = self.look(DENSE)
        ordered = self._by_loss(dense) if self._limits.peak_bytes is not None else self._by_bytes(dense)
        for candidate, reason in ordered:
            tested = self._tested(candidate)
            if tested.may_be:
                return tested.told(outcome=f"{CHOSEN}: {reason}")
            self.keep(tested)
        return None

    def _relax(self, slowdown: float) -> None:
        """Allow other steps: so many dense ones."""
        self._limits = replace(self._limits, slowdown=slowdown)
        self._seen.clear()

    def given(self, choices: Choices, start: Start) -> PricedChoice:
        """The answer that choices describe, their factors made by a weighting of errors: priced, judged and timed.

        Raises:
            ConfigError: If they do not fit the model.
            InfeasibleBudgetError: If they do not keep to the limits.
        """
        if self._limits.wished:
            self._relax(math.inf)
        found = self.look(DENSE)
        if choices.factorized:
            found = self.look(Rung(0.0, "given", choices, start))
            found = self.judged(found, self._ladders.exact) if found.may_be else found
        found = self._tested(found) if found.may_be else found
        if not found.may_be:
            self._shortfall.least = found
            raise self._infeasible()
        return self.keep(found.told(outcome=GIVEN))

    def look(self, rung: Rung) -> PricedChoice:
        """Price a rung and plan its step; its outcome says where it breaks the limits."""
        number = next((i for i, found in enumerate(self._looked) if found.rung == rung), None)
        if number is not None:
            if self._put_off(self._looked[number]):
                self._looked[number] = self._planned(self._looked[number].told(outcome=""))
            return self.keep(self._in_time(self._looked[number]))
        self._note()
        with doing("record"):
            price = self._pricer.price(rung.choices)
        if rung == DENSE:
            self.dense_step = price.trace
        keep_bytes = Simulator(price.trace).peak_bytes
        loss = _UNKNOWN_LOSS if rung.choices.factorized else 0.0
        row = Considered(rung.share, rung.resource, price.parameters, keep_bytes, keep_bytes, 0.0, loss, 0.0, "")
        found = self._planned(PricedChoice(rung, price.trace, row))
        if self._limits.peak_bytes is not None:  # else a plan depends on the time that it may take
            self._looked.append(found)
        return self.keep(self._in_time(found))

    def _planned(self, found: PricedChoice) -> PricedChoice:
        budget = self._limits.peak_bytes
        step = Prepared(found.trace)
        floor = floor_bytes(step)
        if budget is not None and floor > budget:
            return found.told(peak_bytes=floor, outcome=f"no plan goes below {format_bytes(floor)}")
        least_s = self._pricer.least_s(step, budget) if budget is not None and found.rung != DENSE else 0.0
        if self._takes_too_long(least_s / self._pricer.overpriced):
            return found.told(peak_bytes=floor, outcome=self._too_slow(least_s))
        if budget is None and self._takes_too_long(found.trace.seconds):  # no plan makes it faster
            return found.told(outcome=self._too_slow(found.trace.seconds))
        seconds = None if budget is not None else self._pricer.room_s(found.trace, self._limits.slowdown)
        try:
            with doing("plan"):
                made = self._pricer.planned(step, budget, seconds)
        except InfeasibleBudgetError as error:
            least = error.least_peak_bytes
            return found.told(peak_bytes=least, outcome=f"no plan goes below {format_bytes(least)}")
        return replace(found, plan=made).told(peak_bytes=made.peak_bytes, seconds=self._pricer.seconds(made))

    def _put_off(self, found: PricedChoice) -> bool:
        """Whether a candidate that may fit was not planned, because any plan would have taken too long."""
        budget = self._limits.peak_bytes
        return found.plan is None and budget is not None and found.row.peak_bytes <= budget

    def _in_time(self, found: PricedChoice) -> PricedChoice:
        """The same, refused where its plan takes too long."""
        # without the tape's own time, which is known too badly to refuse by: the clock decides
        overpriced = MOST_OVERPRICED if found.rung == DENSE and self._pricer.dense_runs else self._pricer.overpriced
        if found.plan is not None and self._takes_too_long(found.plan.seconds / overpriced):
            return found.told(outcome=self._too_slow(found.plan.seconds))
        return found

    def _too_slow(self, seconds: float) -> str:
        return f"too slow: {self._pricer.slowdown(seconds):.2f} dense steps expected"

    def _takes_too_long(self, seconds: float) -> bool:
        return self._pricer.slowdown(seconds) > self._limits.slowdown * PREDICTION_ERROR

    def _ladder(self, resource: str) -> Iterator[PricedChoice]:
        """Candidates that keep to the limits as far as is known, by falling share."""
        dense_bytes, of_share = self.look(DENSE).row.peak_bytes, partial(self._peak_bytes, resource)
        for above, share in pairwise(shares_within(dense_bytes, self._limits.peak_bytes, of_share)):
            found = self._at(share, resource)
            if found is None:
                return
            for judged in self._near(found, above) if found.may_be else ():
                if not judged.may_be:  # it loses too much
                    return
                yield judged

    def _peak_bytes(self, resource: str, share: float) -> int:
        """Peak of a candidate's plan, or the least of any; 0 where nothing is that cheap."""
        rung = self._ladders.rung(share, resource)
        return self.look(rung).row.peak_bytes if rung is not None else 0

    def _near(self, found: PricedChoice, above: float) -> Iterator[PricedChoice]:
        """A candidate, judged; before it, where it loses something, one of a larger share that fits as well.

        The larger one is judged in every way first: where it is the answer, that was enough.
        """
        judged = self.judged(found, self._ladders.first)
        larger = None if self._loses_nothing(judged) else self._at(between(above, found.row.share), found.row.resource)
        if larger is not None and larger.may_be:
            larger = self.judged(larger)
            if not self._loses_nothing(larger) or not self._loses_nothing(judged := self.judged(found)):
                yield larger
        yield judged if self._loses_nothing(judged) else self.judged(found)

    def _loses_nothing(self, judged: PricedChoice) -> bool:
        return judged.row.loss <= self._negligible()

    def _at(self, share: float, resource: str) -> PricedChoice | None:
        """A candidate, looked at; None where nothing is that cheap. One that was seen before is not looked at again."""
        rung = self._ladders.rung(share, resource)
        if rung is None:
            return None
        if rung.choices.factorized in self._seen:
            row = Considered(share, resource, 0, 0, 0, 0.0, _UNKNOWN_LOSS, 0.0, "seen before")
            return PricedChoice(rung, self._pricer.dense, row)
        self._seen.append(rung.choices.factorized)
        return self.look(rung)

    def judged(self, found: PricedChoice, tried: Callable[[Rung], Trial] | None = None) -> PricedChoice:
        """Compute a candidate's factors and measure their loss.

        Args:
            found: Looked at.
            tried: From a rung to its trial; None lets the best weightings of errors at its share choose others.
        """
        trial = (tried or self._ladders.best)(found.rung)
        if trial.choices.factorized != found.rung.choices.factorized:
            other = self.look(replace(found.rung, choices=trial.choices, start=trial.start))
            if other.may_be:
                found = other
            else:
                trial = self._ladders.exact(found.rung)
        refusal = self._allowance.refusal(trial)
        return self.keep(replace(found, trial=trial).told(loss=trial.divergence, outcome=refusal))

    def _tested(self, found: PricedChoice) -> PricedChoice:
        """Time a candidate, and check its loss."""
        refusal = self._allowance.refusal(found.trial) if found.trial is not None else ""
        if refusal:  # by knowledge gained since it was judged
            return found.told(outcome=refusal)
        asks = found.trial is not None or not self._limits.wished  # for a cut, or a hard limit, the clock decides
        timed = self.timed(found) if asks or not self._pricer.foretells(found.plan, self._limits.slowdown) else found
        return self._settled(timed) if timed.may_be else timed

    def _settled(self, found: PricedChoice) -> PricedChoice:
        if found.trial is None:
            return found
        trial, outcome, metric = self._allowance.settled(found.trial)
        self._ladders.keep(found.rung, trial)
        return replace(found, trial=trial).told(loss=trial.divergence, metric=metric, outcome=outcome)

    def _by_loss(self, dense: PricedChoice) -> Iterator[Ordered]:
        """By rising measured loss: the dense model, then of each ladder's next candidate the better one.

        One that loses nothing is tried before another ladder is begun.
        """
        fits = f"fits{within(self._limits)}"
        if dense.may_be:
            yield dense, f"the dense model {fits}"
        if self._limits.wished:
            self._ask(dense, self._limits.slowdown)
        heads: list[tuple[PricedChoice, Iterator[PricedChoice]]] = []
        for ladder in map(self._ladder, () if self._allowance.forbids_cuts else RESOURCES):
            while (head := next(ladder, None)) is not None and self._loses_nothing(head):
                yield head, f"the first that {fits} and loses next to nothing, {self._negligible():.1g} nats or less"
            heads += [(head, ladder)] if head is not None else []
        while heads:
            best, ladder = min(heads, key=lambda pair: pair[0].row.loss)
            yield best, f"the least loss of those looked at whose step {fits}"
            heads = [pair for pair in heads if pair[1] is not ladder]
            heads += [(head, ladder) for head in (next(ladder, None),) if head is not None]

    def _by_bytes(self, dense: PricedChoice) -> Iterator[Ordered]:
        """By rising peak, the dense model last; larger shares only if no smaller one is the answer."""
        time = within(self._limits)
        ladders = [self._allowed(resource) for resource in RESOURCES]
        while found := [candidate for ladder in ladders for candidate in while_falling(ladder)]:
            for candidate in sorted(found, key=lambda candidate: candidate.row.peak_bytes):
                judged = self.judged(candidate)
                if judged.may_be and not (dense.may_be and judged.row.peak_bytes >= dense.row.peak_bytes):
                    yield judged, f"of the cuts whose loss is allowed the least peak{time}"
        if dense.may_be:
            yield dense, f"no cut whose loss is allowed has a smaller peak{time}"

    def _allowed(self, resource: str) -> Iterator[PricedChoice]:
        """Candidates by rising share, from the smallest on whose loss may be allowed."""
        shares = sorted({*SHARES, *(between(a, b) for a, b in pairwise((1.0, *SHARES)))})
        for share in shares[bisect_left(shares, True, key=partial(self._may_be_allowed, resource)) :]:
            found = self._at(share, resource)
            if found is not None and found.may_be:
                yield found

    def _may_be_allowed(self, resource: str, share: float) -> bool:
        rung = self._ladders.rung(share, resource)
        return rung is not None and not self._allowance.excludes(self._ladders.best(rung))

    @doing("time")
    def timed(self, found: PricedChoice) -> PricedChoice:
        """Run a candidate's step under its plan, count its peak and time it in turns with the dense step."""
        self._note()
        model = self._model if found.trial is None else twin_with(self._model, found.trial.layers)
        with unmoved(self._model):  # which later candidates are judged by
            try:
                return self._clocked(found, model)
            except (torch.OutOfMemoryError, ReplayError):
                return found  # it fits, but not in the allocator's pieces, or bits differed: training plans again

    def _clocked(self, found: PricedChoice, model: nn.Module) -> PricedChoice:
        forward, pricer = partial(self._forward, model), self._pricer
        watched = RealStep(model, forward, found.plan).watched()
        if watched.diverged:  # another step than the one on fake tensors: plan the real one
            found = self._in_time(self._planned(replace(found, trace=pricer.really(model))))
            if not found.may_be:
                return found
            watched = RealStep(model, forward, found.plan).watched()
        found = replace(found, measured_peak_bytes=watched.peak_bytes + found.trace.resident_bytes)
        if not pricer.dense_runs:
            return found
        dense = found.plan if found.trial is None else None
        if dense is not None and dense.keeps_all:  # it is the dense step
            return found.told(measured_slowdown=1.0)
        step = RealStep(model, forward, found.plan)
        ratio = watched.seconds / pricer.dense_s if pricer.is_long else in_turns(self._dense, step).ratio
        if dense is not None:
            pricer.learn_from(dense, ratio)
        found = found.told(measured_slowdown=ratio)
        if ratio > self._limits.slowdown * CLOCK_ERROR:
            return found.told(outcome=f"too slow: {ratio:.2f} dense steps by the clock")
        return found

    def keep(self, found: PricedChoice) -> PricedChoice:
        """Note a candidate's record; those of least peak are held for the error."""
        self.considered[found.row.share, found.row.resource] = found.row
        self._shortfall.note(found, self._limits)
        return found

    def _infeasible(self) -> InfeasibleBudgetError:
        found = self._shortfall.least
        assert found is not None
        self._plan_one_for_the_hint()
        if found.row.loss == _UNKNOWN_LOSS:
            self.keep(found.told(loss=self._ladders.exact(found.rung).divergence))
        return self._shortfall.error(self._limits, self.considered.values(), self._allowance.remedy())

    def _plan_one_for_the_hint(self) -> None:
        """Plan the fastest of those that would have taken too long, where no other has a plan."""
        limits, self._limits = self._limits, replace(self._limits, slowdown=math.inf)
        for found in sorted(filter(self._put_off, self._looked), key=lambda found: found.trace.seconds):
            if not any(row.seconds for row in self.considered.values()):
                made = self._planned(found.told(outcome="")).row
                self.considered[made.share, made.resource] = made
        self._limits = limits
