"""Bytes and seconds of candidates that are never run: a fake recording of each, its seconds from the one dense step.

Ops that the dense step has too get its times, those of factorized layers are measured alone, each distinct call once
(``CallSeconds``). The peaks of 22 candidates on two networks were those of real recordings to 0.1 MiB; the steps
of eleven were predicted within 5 % of the clock on one thread. Where a model's step does not run on fake tensors, or
runs other ops there, every candidate is recorded for real.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.gpu_memory import left_bytes
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.joint.turns import RealStep, in_turns
from ctdr_lightning.joint.twins import structure_of, unmoved
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, lower_bound_seconds
from ctdr_lightning.memory.lean.choice import LeanChoice, choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.plans.plan import Plan, host_wait_seconds
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.recorder.fake import record_fake
from ctdr_lightning.memory.recorder.recorder import record
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.optimizer import OptimizerBytes
from ctdr_lightning.memory.traces.trace import OpRecord, Trace
from ctdr_lightning.memory.traces.typical_seconds import steady

_log = logging.getLogger(__name__)
# A step of two seconds and more is run once, and recorded meanwhile: ResNet-50's at batch 32 takes 8 s on a core.
_N_RECORDINGS, _LONG_S = 3, 2.0
_SAFE_SHARE = 0.8  # of the free memory: fragments take the rest
# With 0.3 s of thought a 30 MiB plan of the demo's network took 0.26 s a step, with 1 s and with 5 s 0.21 s.
PLANNING_S = 1.0
# Plans of the dense model are priced too high by up to this factor, the deepest most (1.01 to 1.5 on ten networks). To
# time one takes a second, and it is exact; to look for a cut in its place takes ten.
MOST_OVERPRICED = 1.6
# The tape added 50 to 90 us to a step for each op that it sees, on two transformers with 30 plans; two plans
# of the dense step gave it within a third, and one is tried, to plan less. In longer steps it is under 5 %, and not
# measured but taken as usual.
_TRIED_SHARE, _SHORT_S, _USUAL_TAPE_S, _MOST_TAPE_S, _TRIED_PLANNING_S = 0.4, 0.15, 7e-5, 1e-4, 0.1


Account = Callable[[Trace, nn.Module], BatchAccount]


def standing(
    taken: Callable[[Sequence[Tensor]], OptimizerBytes], beside_bytes: int | Callable[[nn.Module], int]
) -> Account:
    """The account of a batch without a trainer.

    Args:
        taken: From the trained parameters to the bytes of their optimizer.
        beside_bytes: Further bytes in memory during a candidate's step.
    """

    def account(trace: Trace, candidate: nn.Module) -> BatchAccount:
        beside = beside_bytes(candidate) if callable(beside_bytes) else beside_bytes
        return BatchAccount(trace.with_static(beside), taken([p for p in candidate.parameters() if p.requires_grad]))

    return account


@dataclass(frozen=True)
class Price:
    """The price of a candidate.

    Attributes:
        trace: Its step, with all resident bytes and everything that follows it.
        parameters: All of its parameters.
    """

    trace: Trace
    parameters: int


class Pricer:
    """Prices the steps of one model's candidates.

    Args:
        model: Dense; its gradients are freed, its buffers change as in any step.
        step: Runs the model on a batch; returns the loss.
        batch: One batch as in training.
        account: From a recorded step and its candidate to the account of a batch.
        plain: Pricer of the plain step, where this is a leaner one: it may have recorded that already, and a long step
            is not run again if its operators' times are known.

    Attributes:
        dense: Trace of the dense step.
        dense_s: Seconds of the dense step by the clock.
        dense_runs: Whether the dense step fits into the device's memory without a plan.
        step: The step that is priced.
        account: As given.
        overpriced: Factor by which plans are predicted too slow, as far as a timed one has shown.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Any, Any], Tensor],
        batch: Any,
        account: Account,
        plain: Pricer | None = None,
    ) -> None:
        self._model, self.step, self._batch = model, step, batch
        self.account = account
        self._lean_recording: Trace | None = None
        self.overpriced = 1.0
        self.dense_runs, self.dense_s, self._on_fakes = True, 0.0, False
        if plain is not None and plain.is_long and plain._on_fakes:
            self._take_times_of(plain)
            return
        recorded = self._dense_step(plain._lean_recording if plain is not None else None)
        self._python_s_per_replay, self._shares = recorded.python_s_per_replay, _shares(recorded)
        self._calls = CallSeconds()
        self._on_fakes = self._learn(recorded)
        self.dense = self._faked(model) if self._on_fakes else recorded

    def _take_times_of(self, plain: Pricer) -> None:
        """Price a step by the times of another one's operators; those that it alone has are measured."""
        self._python_s_per_replay, self._shares = plain._python_s_per_replay, plain._shares
        self.dense_runs, self._calls, self._on_fakes = plain.dense_runs, plain._calls, True
        self.dense = self._faked(self._model)
        self.dense_s = plain.dense_s * self.dense.seconds / plain.dense.seconds

    @property
    def is_long(self) -> bool:
        """Whether a dense step takes so long that few may be run."""
        return self.dense_s >= _LONG_S

    def _dense_step(self, recording: Trace | None) -> Trace:
        """Record the dense step, where it fits without limits of memory, and time it; a long one is run once."""
        recordings = [recording] if recording is not None else []
        try:
            recordings = recordings or [self.recorded(self._model)]
        except torch.OutOfMemoryError:
            self.dense_runs = False
        # only here, as the frames of the failed try would keep its tensors
        recordings = recordings or [self.recorded(self._model)]
        # a short step may be slow the first time, a long one hardly: its first run is its time
        is_long = recordings[0].seconds >= _LONG_S
        recordings += [self.recorded(self._model) for _ in range(0 if is_long else _N_RECORDINGS - 1)]
        recorded = steady(recordings)
        self.dense_s = recorded.seconds
        if self.dense_runs and not is_long:
            whole = RealStep(self._model, partial(self.step, self._model, self._batch))
            self.dense_s = min(whole.seconds() for _ in range(_N_RECORDINGS))
        return recorded

    def foretells(self, made: Plan | None, slowdown: float) -> bool:
        """Whether a plan of the dense step takes no longer, which is known without a run where the step is long.

        Its ops' times were recorded in the step, and the tape's own time is small beside them.

        Args:
            made: The plan.
            slowdown: In dense steps.
        """
        return self.is_long and made is not None and self.slowdown(made.seconds) <= slowdown

    def choose_lean(self, budget_bytes: int | None, *, tiles: bool) -> LeanChoice | None:
        """A leaner dense step for a budget; None where the plain one fits unchanged, or nothing is gained.

        Args:
            budget_bytes: The budget; None for none.
            tiles: Whether modules may run in tiles.
        """

        def account(lean_step: LeanStep) -> BatchAccount:
            step = lean_step.step(self.step)
            if self._on_fakes:
                lean = self._fake(self._model, step)
            else:
                lean = self._really(step, self._model)
                self._lean_recording = lean if self.dense_runs else None
            return self.account(lean, self._model)

        plain = self.account(self.dense, self._model)
        return choose_lean(self._model, account, budget_bytes, plain=plain, tiles=tiles and self._on_fakes)

    def price(self, choices: Choices) -> Price:
        """The price of a candidate's step, its optimizer's state included.

        Args:
            choices: Checked against the model.
        """
        candidate = structure_of(self._model, choices) if choices.factorized else self._model
        if not choices.factorized:
            found = self.dense
        else:
            found = self._faked(candidate) if self._on_fakes else self.recorded(candidate)
        return Price(self.account(found, candidate).whole, sum(p.numel() for p in candidate.parameters()))

    def really(self, model: nn.Module) -> Trace:
        """The same of a candidate whose step is recorded for real."""
        return self.account(self.recorded(model), model).whole

    def planned(self, step: Trace | Prepared, peak_bytes: int | None = None, seconds: float | None = None) -> Plan:
        """The fastest plan of a step within a peak, or the one of least peak within a time.

        Raises:
            InfeasibleBudgetError: If no plan has so small a peak.
        """
        return plan(step, Budget(peak_bytes, seconds, PLANNING_S))

    def least_s(self, step: Prepared, peak_bytes: int) -> float:
        """Seconds that no plan within a peak goes below; of values that may be moved or packed the plain step's."""
        return step.trace.seconds if step.trace.links or step.trace.codecs else lower_bound_seconds(step, peak_bytes)

    def seconds(self, made: Plan) -> float:
        """Time of a step under a plan: the plan's own prediction, plus the tape's cost of seeing ops."""
        if made.trace.device == "cuda":
            return made.wall_seconds
        return made.seconds + (self._tape_s_per_op * made.n_seen if made.n_seen else 0.0)

    def tape_s(self, trace: Trace) -> float:
        """The most that the tape's seeing of ops costs under any plan of a step."""
        if trace.device == "cuda":
            return host_wait_seconds(trace, len(trace.forward_ops))
        return self._tape_s_per_op * len(trace.forward_ops)

    def slowdown(self, seconds: float) -> float:
        """Time in steps of the dense model."""
        return seconds / self.dense.seconds

    def learn_from(self, made: Plan, ratio: float) -> None:
        """Compare a plan of the dense model with the clock: plans of cuts are priced too high alike.

        Args:
            made: The plan.
            ratio: Its measured time in dense steps.
        """
        self.overpriced = min(max(self.slowdown(made.seconds) / ratio, 1.0), MOST_OVERPRICED)

    def room_s(self, trace: Trace, slowdown: float) -> float:
        """Longest time of a step's plan where it may take so many dense steps; at least the plain step's own."""
        return max(slowdown * self.dense.seconds - self.tape_s(trace), trace.seconds)

    @cached_property
    def _tape_s_per_op(self) -> float:
        """Seconds of the tape on a processor for each op that it sees; asked for by the first plan that drops one."""
        if not self.dense_runs or self.dense_s >= _SHORT_S:
            return _USUAL_TAPE_S
        with unmoved(self._model):
            return self._tape_cost()

    def _tape_cost(self) -> float:
        """The same, measured on the dense step under a plan."""
        least, most = floor_bytes(self.dense), Simulator(self.dense).peak_bytes
        forward = partial(self.step, self._model, self._batch)
        budget = Budget(round(least + _TRIED_SHARE * (most - least)), time_limit_s=_TRIED_PLANNING_S)
        try:
            made = plan(self.dense, budget)
        except InfeasibleBudgetError:
            return _USUAL_TAPE_S
        turns = in_turns(RealStep(self._model, forward), RealStep(self._model, forward, made))
        beyond_s = turns.second_s - turns.first_s - made.recompute_seconds
        return min(max(beyond_s, 0.0) / max(made.n_seen, 1), _MOST_TAPE_S)

    def _learn(self, recorded: Trace) -> bool:
        try:
            return self._calls.learn(lambda: self._fake(self._model), recorded, self.dense_s)
        except Exception as error:  # whatever an op or the user's own code says to tensors without data
            _log.info("CTDR: the step does not run on fake tensors (%s); each candidate is recorded.", error)
            return False

    def _fake(self, model: nn.Module, step: Callable[[Any, Any], Tensor] | None = None) -> Trace:
        return record_fake(model, self._batch, step or self.step, device=self._calls, reads_values=True)

    def _faked(self, model: nn.Module) -> Trace:
        trace = self._fake(model)
        shares = {i: self._shares[k] for i, op in enumerate(trace.ops) if (k := _kind(trace, op)) in self._shares}
        return trace.with_costs([op.seconds for op in trace.ops], {}, self._python_s_per_replay, shares)

    def recorded(self, model: nn.Module) -> Trace:
        """A real recording of a candidate's step; kept within the device's free memory where the dense step is not."""
        return self._really(self.step, model)

    def _really(self, step: Callable[[Any, Any], Tensor], model: nn.Module) -> Trace:
        for parameter in model.parameters():
            parameter.grad = None
        left = None if self.dense_runs else round(_SAFE_SHARE * left_bytes(next(model.parameters()).device))
        # A GPU short of memory takes other kernels, with other bits, and nobody reads these gradients.
        return record(partial(step, model, self._batch), budget_bytes=left, root=model, verify="never")


def _shares(trace: Trace) -> dict[tuple[Any, ...], float]:
    """Replay shares of ops with a shortcut, by kind of op."""
    return {_kind(trace, op): op.replay_share for op in trace.ops if op.replay_share < 1}


def _kind(trace: Trace, op: OpRecord) -> tuple[Any, ...]:
    return (op.name, op.backward, *(trace.values[v].shape for v in op.inputs[:1]))
