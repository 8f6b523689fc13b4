"""The means that keep a budget where recomputation alone does not, before a layer is cut: found in a choice of ranks.

The optimizer's step in the backward, tensors or the optimizer's state that wait elsewhere, batches in parts. Each is
foreseen on a copy of the model, and carried out by a run with other arguments and dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Plan, Trace, record_fake
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.helpful_places import plan_with
from ctdr_lightning.memory.holders.optimizer_state import updates_one_by_one
from ctdr_lightning.memory.simulator.actions import Offload
from ctdr_lightning.trainer.accuracy.auto_rank import Copy
from ctdr_lightning.trainer.options import (
    ELSEWHERE,
    IN_PARTS,
    INSIDE,
    NORMS_IN_PARTS,
    STATE_ELSEWHERE,
    CallbackOptions,
)
from ctdr_lightning.trainer.training_step.optimizer.candidate_account import candidate_account
from ctdr_lightning.trainer.training_step.optimizer.in_backward import hindrance, may_step_inside
from ctdr_lightning.trainer.training_step.sub_batches.checks import sub_batch_hindrance
from ctdr_lightning.trainer.training_step.sub_batches.foreseen import parts_means, why_not_in_parts
from ctdr_lightning.trainer.training_step.sub_batches.parts import can_be_cut

# The median of the ten rows in parts of docs/joint.md, which took x1.14 to x2.45 of the plain step.
_AS_LONG_AS_PARTS = 1.6
_NAMES = {INSIDE: "the optimizer's step in the backward", IN_PARTS: "batches in parts"}
_NOT_SHOWN = "a step on tensors without contents does not show that each gradient comes in one part"
_IN_WORDS = {
    INSIDE: "the optimizer updates each parameter in the backward, as its gradient is ready, which changes no bit",
    ELSEWHERE: "tensors that do not fit wait off the device, which is exact",
    STATE_ELSEWHERE: "the optimizer's state waits off the device between its steps, which is exact",
    IN_PARTS: "batches run in parts: exact if their loss is a mean over samples",
    NORMS_IN_PARTS: "batches run in parts, each of which BatchNorm normalises by itself, as under DDP on several GPUs",
}


class SpareMeans:
    """Finds a means for one choice.

    Args:
        trainer: About to train.
        options: The callback's.
        module: The model.

    Attributes:
        hindrances: Why a means cannot be used, by its name in words.
    """

    def __init__(self, trainer: Any, options: CallbackOptions, module: LightningModule) -> None:
        self._trainer, self._options, self._module = trainer, options, module
        self._slowdowns: dict[str, float] | None = None
        self.hindrances: dict[str, str] = {}

    def parts(self, batch: Any) -> str:
        """The kind of parts that a batch may run in; empty for none."""
        found = parts_means(self._options, self._trainer, self._module) if can_be_cut(batch) else ""
        if not found and (reason := sub_batch_hindrance(self._trainer, self._module)):
            self.hindrances[_NAMES[IN_PARTS]] = reason
        return found

    def keeping(
        self, copy: Copy, step: Callable[[Any, Any], Tensor], dense: Trace, budget_bytes: int, slowdown: float
    ) -> str:
        """A means that keeps the budget within a time; empty for none.

        Within a finite one the faster of the step in the backward and tensors elsewhere. At any time the first of: the
        step in the backward, if it takes no longer than parts usually do; exact parts; the faster of these two; the
        optimizer's state elsewhere; other parts.

        Args:
            copy: The model.
            step: From module and batch with its index to the loss.
            dense: The recorded step of the dense model.
            budget_bytes: The budget.
            slowdown: The longest time, in plain dense steps.
        """
        if self._slowdowns is None:
            self._slowdowns = self._fitting(copy, dense, budget_bytes)
            if INSIDE in self._slowdowns and not may_step_inside(copy.module, copy.batch, step):
                del self._slowdowns[INSIDE]
                self.hindrances[_NAMES[INSIDE]] = _NOT_SHOWN
        times = self._slowdowns
        fastest = min(times, key=times.__getitem__, default="")
        if math.isfinite(slowdown):
            return fastest if fastest and times[fastest] <= slowdown else ""
        if times.get(INSIDE, math.inf) <= _AS_LONG_AS_PARTS:
            return INSIDE
        parts = self.parts(copy.batch[1])
        if parts == IN_PARTS and self._fits_in_parts(copy, step, budget_bytes):
            return parts
        if fastest or self._fits_with_state_elsewhere(copy, dense, budget_bytes):
            return fastest or STATE_ELSEWHERE
        return parts if parts == NORMS_IN_PARTS and self._fits_in_parts(copy, step, budget_bytes) else ""

    def _fitting(self, copy: Copy, dense: Trace, budget_bytes: int) -> dict[str, float]:
        """Time of the dense step by each means of whole batches that keeps the budget, in plain steps."""
        plans = {
            INSIDE: self._planned(self._inside(copy), copy, dense, budget_bytes),
            ELSEWHERE: self._planned(self._options.elsewhere(dense.device), copy, dense, budget_bytes),
        }
        # a plan that moves nothing is as the one that was refused
        return {
            means: made.slowdown
            for means, made in plans.items()
            if made is not None and (means == INSIDE or any(isinstance(a, Offload) for a in made.away.values()))
        }

    def _inside(self, copy: Copy) -> CallbackOptions | None:
        optimizers = [copy.optimizer] if copy.optimizer is not None else []
        hindered = hindrance(self._trainer, self._module, optimizers, keeps_gradients=False)
        if hindered:
            self.hindrances[_NAMES[INSIDE]] = hindered
        return None if hindered else self._options.inside()

    def _fits_with_state_elsewhere(self, copy: Copy, dense: Trace, budget_bytes: int) -> bool:
        can_wait = copy.optimizer is not None and updates_one_by_one(copy.optimizer)
        options = self._options.state_elsewhere(dense.device) if can_wait else None
        return self._planned(options, copy, dense, budget_bytes) is not None

    def _planned(self, options: CallbackOptions | None, copy: Copy, dense: Trace, budget_bytes: int) -> Plan | None:
        if options is None:
            return None
        account = candidate_account(self._trainer, options, copy.optimizer, copy.batch[1], dense, copy.module)
        found = plan_with(options.places().on(dense.device), account, budget_bytes)
        return None if found is None else found[1]

    def _fits_in_parts(self, copy: Copy, step: Callable[[Any, Any], Tensor], budget_bytes: int) -> bool:
        index, batch = copy.batch

        def account(part: Any) -> BatchAccount:
            recorded = record_fake(copy.module, (index, part), step, reads_values=True)
            return candidate_account(self._trainer, self._options, copy.optimizer, batch, recorded, copy.module)

        def of_part(few: Any) -> Tensor:
            return step(copy.module, (index, few))

        reason = why_not_in_parts(self._trainer, copy.module, batch, of_part, account, budget_bytes)
        if reason:
            self.hindrances[_NAMES[IN_PARTS]] = reason
        return not reason


def by_means(
    options: CallbackOptions, trainer: Any, module: LightningModule, error: InfeasibleBudgetError
) -> tuple[CallbackOptions, str] | None:
    """The arguments for dense layers and the means that an error names, and this in words; None where there is none.

    Batches whose tensors may wait elsewhere run whole wherever they fit so. Exact parts need not be named.

    Args:
        options: The callback's.
        trainer: About to train.
        module: The model.
        error: The refusal of the whole batch on its device.
    """
    parts = parts_means(options, trainer, module)
    cut = options.in_parts() if parts == IN_PARTS or (parts and error.means == parts) else None
    means = error.means if error.means in (INSIDE, ELSEWHERE, STATE_ELSEWHERE) else parts
    device = trainer.strategy.root_device.type
    if means == INSIDE:
        chosen = options.inside()
    elif means in (ELSEWHERE, STATE_ELSEWHERE):
        chosen = options.elsewhere(device) if means == ELSEWHERE else options.state_elsewhere(device)
        chosen = replace(chosen, sub_batches="auto") if chosen is not None and cut is not None else chosen
    else:
        chosen = replace(cut, batch_norm_in_parts=True) if cut is not None and means == NORMS_IN_PARTS else cut
    return None if chosen is None else (chosen, _IN_WORDS[means])
