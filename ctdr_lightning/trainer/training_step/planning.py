"""The one place of a run that plans: from a recorded step to the plan of its batch, or to the error with its advice."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.progress_bar import doing, one_bar
from ctdr_lightning.joint.promise import promise
from ctdr_lightning.memory import Plan, Trace, plan
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.many_shapes import ManyShapes
from ctdr_lightning.memory.policies import Budget
from ctdr_lightning.memory.traces.foreseen import FORESEEN
from ctdr_lightning.memory.traces.machine import Link
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.advice import Adviser, optimizer_does_not_fit
from ctdr_lightning.trainer.training_step.bytes_beside import BytesBeside
from ctdr_lightning.trainer.training_step.sub_batches.checks import batch_norm_of, sub_batch_hindrance
from ctdr_lightning.trainer.training_step.sub_batches.parts import n_samples
from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks, fake_steps


class BatchPlanner:
    """Plans batches as the options ask.

    Args:
        options: The callback's.
        beside: The bytes beside the steps.
        places: Places and codecs for saved tensors.
        budget_bytes: The budget; None for none.

    Attributes:
        shapes: Plans of steps that differ in sizes alone.
        inputs: The arguments of a step without a plan; None where it has one.
        rest_peak_bytes: Bytes of the last batch that was planned, while its optimizer steps.
    """

    def __init__(self, options: CallbackOptions, beside: BytesBeside, places: Places, budget_bytes: int | None) -> None:
        self._options, self._beside, self._places = options, beside, places
        self.budget_bytes = budget_bytes
        self._attached: LightningModule | None = None
        self._links: list[Link] | None = None
        self.shapes = ManyShapes(plan)
        self.inputs: Any = None
        self.rest_peak_bytes = self._n_planned = 0
        self._tightened = self._warned = False

    def attach(self, module: LightningModule) -> None:
        """Plan the steps of a model, which has its trainer."""
        self._attached = module

    def release(self) -> None:
        """Let go of the model and its batch."""
        self._attached = self.inputs = None

    @property
    def _module(self) -> LightningModule:
        assert self._attached is not None, "nothing is planned between two fits"
        return self._attached

    def __call__(self, trace: Trace) -> Plan:
        """The plan of this process alone: results do not depend on plans, and no process waits for another's.

        Raises:
            InfeasibleBudgetError: When nothing fits, and such a step is not run as small as it can be.
        """
        account, limit = self._beside.account(self._on_machine(trace)), self.budget_bytes
        self.rest_peak_bytes = account.rest_bytes
        if limit is not None and account.rest_bytes > limit:
            named = self._ends_the_run  # a warning names no change
            error = self._adviser(account).optimizer_error() if named else optimizer_does_not_fit(account, limit)
            self._refuse(error, trace)
        try:
            with one_bar(self._shown), doing("plan the step"):
                made = self._best(account)
        except InfeasibleBudgetError as error:
            # another policy than the default one has its own hint: the default one
            tried = self._ends_the_run and limit is not None and self._options.policy == "auto"
            self._refuse(self._adviser(account).advised(error) if tried else error, trace)
            made = plan(account.standing, Budget(seconds=math.inf))  # the least peak at any time
        self._n_planned += 1
        return made

    def tighten(self, budget_bytes: int) -> None:
        """Plan for less from now on, and refuse nothing: the user's own budget was larger."""
        self.budget_bytes, self._tightened = budget_bytes, True

    def _on_machine(self, trace: Trace) -> Trace:
        if self._links is None:
            self._links = self._places.links()
        return trace.with_machine(self._links, self._places.codec_costs(trace))

    def _best(self, account: BatchAccount) -> Plan:
        options, trace = self._options, account.standing
        if self.budget_bytes is not None and options.policy == "auto":
            return self.shapes(trace, self.budget_bytes)
        if self.budget_bytes is not None or options.policy != "auto":
            return plan(trace, self.budget_bytes, options.policy)
        made = promise(trace, self._module, options.max_slowdown or 1.0)
        # a peak below that of the optimizer's step would cost time for nothing
        return plan(trace, account.rest_bytes) if made.peak_bytes < account.rest_bytes else made

    @property
    def limits(self) -> Hashable:
        """A key of all but the batch that the number of sub-batches depends on."""
        return self.budget_bytes, self._beside.optimizer

    def fewest_sub_batches(self, inputs: Any) -> int:
        """In how few sub-batches a batch fits the budget; where it never does, as many as it has samples.

        Args:
            inputs: The arguments of the step, the batch first.

        Raises:
            ConfigError: When the step cannot be recorded on fake tensors.
        """
        with one_bar(self._shown), doing("count sub-batches"):
            return self._sub_batch_peaks(inputs).fewest() or n_samples(inputs[0][0])

    def _sub_batch_peaks(self, inputs: Any) -> SubBatchPeaks:
        assert self.budget_bytes is not None
        module = self._module
        recorded = fake_steps(module.trainer, module)

        def account(inputs: Any) -> BatchAccount:
            return self._beside.account_of_part(self._on_machine(recorded(inputs)), module, inputs)

        sizes = [p.nbytes for p in module.parameters() if p.requires_grad]
        return SubBatchPeaks(account, sizes, inputs, self.budget_bytes, self._options.policy)

    @property
    def _shown(self) -> bool:
        trainer: Any = self._module.trainer
        return self._options.verbose and trainer.is_global_zero

    def _adviser(self, account: BatchAccount) -> Adviser:
        assert self.budget_bytes is not None
        cut = self._sub_batch_peaks(self.inputs) if self._may_cut() else None
        return Adviser(self._module.trainer, self._module, self._options, account, self.budget_bytes, cut)

    def _may_cut(self) -> bool:
        """Whether the batch of the present step could run as sub-batches, and does not."""
        if self.inputs is None or self._options.cuts_hindrance("auto") or self._options.sub_batches is not None:
            return False
        return not (batch_norm_of(self._module) or sub_batch_hindrance(self._module.trainer, self._module))

    @property
    def _ends_the_run(self) -> bool:
        """Whether a batch that does not fit is an error, rather than run as small as it can be."""
        asked, trainer = self._options.over_budget, cast(Any, self._module.trainer)
        begun = self._n_planned > 0 or trainer.global_step > 0  # a resumed run may meet its longest batch first
        return not self._tightened and (asked == "raise" or (asked == "auto" and not begun))

    def _refuse(self, error: InfeasibleBudgetError, step: Trace) -> None:
        """Raise the error, or warn once; a step that has not run yet is judged when it has."""
        if self._tightened or FORESEEN in step.meta:
            return
        if self._ends_the_run:
            raise error
        if self.budget_bytes is not None and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"CTDR: {error.problem} Such steps run with the smallest plan found. This warning is shown once. "
                'memory=Memory(over_budget="raise") ends the run instead.'
            )
