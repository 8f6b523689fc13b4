"""The walk over candidates: shares of two resources, each with its plan, by rising loss to the first that fits.

No paper; no published system chooses ranks and recomputation together. Each candidate is priced without being run.
Along a ladder of shares the loss rises, so each ladder is walked down to its first candidate that fits; of the ladders'
candidates the one of least measured KL is timed against the dense step in turns, and where it is too slow its ladder
is walked on. Without a budget all candidates within the loss are planned, and the one of least peak is timed first.
Complexity: one fake recording and one plan a candidate, a factorization and a KL for those that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.report import Report
from ctdr_lightning.joint.budget_fit import Considered
from ctdr_lightning.joint.divergence import mean_kl, outputs_of
from ctdr_lightning.joint.pricing import PLANNING_S, Pricer
from ctdr_lightning.joint.proposals import RESOURCES, SHARES, Proposal, Proposer
from ctdr_lightning.joint.turns import RealStep, Turns, in_turns
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

# Predicted times are wrong by up to 5 %: so far a candidate may miss the limit and still be tried by the clock, whose
# medians of a few pairs spread by 3 %.
_PREDICTION_ERROR, _CLOCK_ERROR = 1.05, 1.03
_UNKNOWN_LOSS = -1.0


@dataclass(frozen=True)
class Limits:
    """What an answer must keep to.

    Attributes:
        peak_bytes: Largest true peak of a step; None asks for the least.
        slowdown: Longest step, in dense steps.
        loss: Largest KL to the dense outputs, in nats; None for no limit.
    """

    peak_bytes: int | None
    slowdown: float
    loss: float | None


@dataclass(frozen=True)
class Candidate:
    """A model with its price.

    Attributes:
        model: The dense model, or a twin of it with factors.
        report: What became of each layer.
        trace: Its step, recorded on fake tensors.
        row: What is known of it; its ``outcome`` is empty as long as it may be the answer.
        plan: Its plan; None where none fits.
        turns: Its step beside the dense one by the clock.
        measured_peak_bytes: Its peak as counted in a run.
    """

    model: nn.Module
    report: Report
    trace: Trace
    row: Considered
    plan: Plan | None = None
    turns: Turns | None = None
    measured_peak_bytes: int = 0

    def told(self, **changes: Any) -> Candidate:
        """The same with other entries in its row."""
        return replace(self, row=replace(self.row, **changes))


class Search:
    """Finds the answer for one model and one set of limits.

    Args:
        model: Dense, trained.
        step: Runs the model on a batch; returns the loss.
        batches: Training batches; the first is priced, all are judged.
        pricer: Prices candidates.
        proposer: Makes them.
        limits: What the answer must keep to.
        note: Told of each candidate that was looked at.

    Attributes:
        considered: A row for every candidate, in the order in which they were looked at.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Any, Any], Tensor],
        batches: Sequence[Any],
        pricer: Pricer,
        proposer: Proposer,
        limits: Limits,
        note: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._step, self._batches = model, step, batches
        self._pricer, self._proposer, self._limits, self._note = pricer, proposer, limits, note
        self._reference = outputs_of(model, step, batches)
        self._limit_s = pricer.dense.seconds * limits.slowdown
        self._least: Candidate | None = None
        self._seen: list[Any] = []
        self.considered: dict[tuple[float, str], Considered] = {}

    def run(self) -> Candidate:
        """The answer.

        Raises:
            InfeasibleBudgetError: When nothing keeps to the limits; it names the least peak and the loss at it.
        """
        dense = self.look(Proposal(1.0, "dense", self._model, self._proposer.dense()))
        for candidate in self._by_loss(dense) if self._limits.peak_bytes is not None else self._by_bytes(dense):
            timed = self.timed(candidate)
            if not timed.row.outcome:
                return self._keep(timed.told(outcome="chosen"))
            self._keep(timed)
        raise self._infeasible()

    def given(self, choices: Choices) -> Candidate:
        """The answer that choices describe, priced, judged and timed.

        Raises:
            ConfigError: When they do not fit the model.
            InfeasibleBudgetError: When they do not keep to the limits.
        """
        found = self.look(Proposal(1.0, "dense", self._model, self._proposer.dense()))
        if choices.factorized:
            found = self.look(self._proposer.given(choices))
        found = found if found.row.outcome or not choices.factorized else self.judged(found)
        found = found if found.row.outcome else self.timed(found)
        if found.row.outcome:
            self._least = found
            raise self._infeasible()
        return self._keep(found.told(outcome="given"))

    def look(self, proposal: Proposal) -> Candidate:
        """Price a proposal and plan its step; its outcome says where it breaks the limits."""
        self._note()
        trace = self._pricer.trace(proposal.model, proposal.choices)
        keep_bytes = Simulator(trace).peak_bytes
        row = Considered(
            proposal.share, proposal.resource, proposal.report.parameters_after, keep_bytes, keep_bytes, 0.0,
            _UNKNOWN_LOSS if proposal.choices.factorized else 0.0, 0.0, "",
        )  # fmt: skip
        found = Candidate(proposal.model, proposal.report, trace, row)
        return self._keep(self._planned(found))

    def _planned(self, found: Candidate) -> Candidate:
        budget = self._limits.peak_bytes
        floor = floor_bytes(found.trace)
        if budget is not None and floor > budget:
            return found.told(peak_bytes=floor, outcome=f"no plan goes below {format_bytes(floor)}")
        seconds = None if budget is not None else max(self._limit_s, found.trace.seconds)
        try:
            made = plan(found.trace, Budget(budget, seconds, PLANNING_S))
        except InfeasibleBudgetError as error:
            least = error.least_peak_bytes
            return found.told(peak_bytes=least, outcome=f"no plan goes below {format_bytes(least)}")
        found = replace(found, plan=made).told(peak_bytes=made.peak_bytes, seconds=self._pricer.seconds(made))
        # without the tape's own time, which is known too badly to refuse by: the clock decides
        if made.seconds > self._limit_s * _PREDICTION_ERROR:
            return found.told(outcome=f"too slow: {made.seconds / self._pricer.dense.seconds:.2f} dense steps expected")
        return found

    def _ladder(self, resource: str) -> Iterator[Candidate]:
        """Candidates that fit as far as is known, by falling share."""
        for share in SHARES:
            proposal = self._proposer.propose(share, resource)
            if proposal is None:
                return
            if proposal.choices.factorized in self._seen:
                continue
            self._seen.append(proposal.choices.factorized)
            found = self.look(proposal)
            if not found.row.outcome:
                found = self.judged(found)
            if not found.row.outcome:
                yield found
            elif self._limits.loss is not None and found.row.loss > self._limits.loss:
                return

    def judged(self, found: Candidate) -> Candidate:
        """Measure what a candidate's ranks cost."""
        loss = mean_kl(self._reference, outputs_of(found.model, self._step, self._batches))
        found = found.told(loss=loss)
        if self._limits.loss is not None and loss > self._limits.loss:
            found = found.told(outcome=f"its loss is over {self._limits.loss:g}")
        return self._keep(found)

    def _by_loss(self, dense: Candidate) -> Iterator[Candidate]:
        if not dense.row.outcome:
            yield dense
        ladders = [self._ladder(resource) for resource in RESOURCES]
        heads = [next(ladder, None) for ladder in ladders]
        while any(heads):
            best = min((i for i, head in enumerate(heads) if head), key=lambda i: heads[i].row.loss)  # type: ignore[union-attr]
            head = heads[best]
            assert head is not None
            yield head
            heads[best] = next(ladders[best], None)

    def _by_bytes(self, dense: Candidate) -> Iterator[Candidate]:
        found = [dense] if not dense.row.outcome else []
        found += [candidate for resource in RESOURCES for candidate in self._ladder(resource)]
        yield from sorted(found, key=lambda candidate: candidate.row.peak_bytes)

    def timed(self, found: Candidate) -> Candidate:
        """Run a candidate's step under its plan, count its peak and time it in turns with the dense step."""
        assert found.plan is not None
        self._note()
        step = self._real(found)
        if step.run():  # another step than the one on fake tensors: plan the real one
            real = self._pricer.recorded(found.model).with_static(self._pricer.state_bytes(found.model))
            found = self._planned(replace(found, trace=real))
            if found.row.outcome or found.plan is None:
                return found
            step = self._real(found)
        found = replace(found, measured_peak_bytes=step.peak_bytes() + found.trace.resident_bytes)
        if not self._pricer.dense_runs:
            return found
        turns = in_turns(RealStep(self._model, partial(self._step, self._model, self._batches[0])), step)
        found = replace(found, turns=turns).told(measured_slowdown=turns.ratio)
        if turns.ratio > self._limits.slowdown * _CLOCK_ERROR:
            return found.told(outcome=f"too slow: {turns.ratio:.2f} dense steps by the clock")
        return found

    def _real(self, found: Candidate) -> RealStep:
        return RealStep(found.model, partial(self._step, found.model, self._batches[0]), found.plan)

    def _keep(self, found: Candidate) -> Candidate:
        """Note what is known of a candidate; the one of least peak is held for the error."""
        row = found.row
        self.considered[row.share, row.resource] = row
        if self._least is None or row.peak_bytes <= self._least.row.peak_bytes:
            self._least = found
        return found

    def _infeasible(self) -> InfeasibleBudgetError:
        assert self._least is not None
        row = self._least.row
        if row.loss == _UNKNOWN_LOSS:
            row = self.judged(self._least).row
        fast = [r for r in self.considered.values() if self._limits.peak_bytes and r.seconds]
        wanted = format_bytes(self._limits.peak_bytes) if self._limits.peak_bytes else "the loss and the time allowed"
        hint = f"Raise memory_budget to {format_bytes(row.peak_bytes)}, or use a smaller batch."
        if fast:
            best = min(fast, key=lambda r: r.seconds)
            slowdown = max(best.measured_slowdown, best.seconds / self._pricer.dense.seconds)
            hint = f"At {slowdown:.2f} dense steps it fits: write max_slowdown={slowdown + 0.05:.2f}."
        return InfeasibleBudgetError(
            f"No ranks and plan fit {wanted} within {self._limits.slowdown:g} dense steps: the least peak found is "
            f"{format_bytes(row.peak_bytes)}, at {row.share:.0%} of the {row.resource}, where the outputs' KL is "
            f"{row.loss:.4f} nats.",
            hint,
            least_peak_bytes=row.peak_bytes,
        )
