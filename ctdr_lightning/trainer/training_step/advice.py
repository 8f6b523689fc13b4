"""The changes that would let a batch of a run fit its budget, and the errors that name them.

A change is tried before it is named: its peak is predicted as that of the run would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule

from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.units import format_bytes, format_roomy
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.memory.account.advice import MEMORY, Change, nearest
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.account.fit import least_peak_bytes, planned_peak_bytes
from ctdr_lightning.memory.helpful_places import place_that_fits
from ctdr_lightning.memory.holders.optimizer_bytes import elsewhere, leaner, predict
from ctdr_lightning.memory.holders.optimizer_state import state_away_of
from ctdr_lightning.memory.traces.optimizer import OptimizerBytes
from ctdr_lightning.trainer.options import IF_NEEDED, CallbackOptions
from ctdr_lightning.trainer.strategies import check_strategy, is_sharded
from ctdr_lightning.trainer.structure import factorized_names
from ctdr_lightning.trainer.training_step.optimizer.in_backward import hindrance
from ctdr_lightning.trainer.training_step.optimizer.resident import gradient_sizes, local_bytes
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import batch_norm_of
from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks

# As for a budget that is asked for: 1 % to spare.
_ROOM = 1.01


@dataclass(frozen=True)
class Adviser:
    """Looks for the changes that would let a batch fit.

    Attributes:
        trainer: In training.
        module: The model.
        options: The callback's.
        account: The batch.
        budget_bytes: The budget.
        sub_batches: The peaks of the batch in sub-batches; None where it cannot be cut.
        lean: The account of the batch without outputs that it may not leave out; None where there are none.
    """

    trainer: Any
    module: LightningModule
    options: CallbackOptions
    account: BatchAccount
    budget_bytes: int
    sub_batches: SubBatchPeaks | None = None
    lean: Callable[[], BatchAccount | None] = lambda: None

    def advised(self, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """The error of forward and backward, with the nearest change before its own hint."""
        return self._with_changes(error, error.least_peak_bytes)

    def optimizer_error(self) -> InfeasibleBudgetError:
        """The error of the optimizer's step, with a budget that is enough for forward and backward too."""
        step_bytes = least_peak_bytes(self.account.standing, self.account.rest_bytes, self.options.policy)
        rank = self._lower_rank(max(self.account.rest_bytes, step_bytes))
        error = optimizer_does_not_fit(self.account, self.budget_bytes, step_bytes, rank)
        return self._with_changes(error, step_bytes)

    def _with_changes(self, error: InfeasibleBudgetError, least_bytes: int) -> InfeasibleBudgetError:
        found = nearest(self.changes(least_bytes), self.budget_bytes)
        return error.but_first(str(found) if found is not None else "").or_else(self._default_rank())

    def changes(self, least_bytes: int) -> Iterator[Change]:
        """The changes, those that cost no time first; each is tried when it is asked for.

        Args:
            least_bytes: The least peak of forward and backward.
        """
        yield from self._settings(least_bytes)
        yield from self._step_inside(least_bytes)
        yield from self._state_elsewhere(least_bytes)
        if self.account.rest_bytes > self.budget_bytes:
            return
        places = self.options.places().on(self.trainer.strategy.root_device.type)
        yield from filter(None, [place_that_fits(self.account, self.budget_bytes, places, self.options.policy)])
        lean = self.lean()
        if lean is not None:
            peak_bytes = planned_peak_bytes(lean, self.budget_bytes, self.options.policy)
            yield Change(MEMORY, "rounding", True, lean, peak_bytes, ", with steps that are the same up to rounding")
        found = self.sub_batches.change() if self.sub_batches is not None else None
        if found is not None:
            norm = batch_norm_of(self.module)
            beside = f", and batch_norm_in_parts=True, so that {norm} normalises each by itself" if norm else ""
            note = f" in {found.value} sub-batches{beside}, if the loss is a mean over samples"
            yield replace(found, value="auto", note=note)

    def _settings(self, least_bytes: int) -> Iterator[Change]:
        if not self.account.in_backward:
            for argument, value, found in leaner(self.trainer.optimizers):
                yield self._with(type(self.trainer.optimizers[0]).__name__, argument, value, found, least_bytes)

    def _state_elsewhere(self, least_bytes: int) -> Iterator[Change]:
        away = elsewhere(self.trainer.optimizers) if self.options.optimizer_step is None else None
        if away is not None:
            yield self._with(MEMORY, "optimizer_state", *away, least_bytes)

    def _with(self, owner: str, argument: str, value: Any, found: OptimizerBytes, least_bytes: int) -> Change:
        """Another optimizer beside the same plan."""
        account = replace(self.account, optimizer=found)
        less = self.account.standing.resident_bytes - account.standing.resident_bytes
        return Change(owner, argument, value, account, max(least_bytes - less, account.rest_bytes))

    def _step_inside(self, least_bytes: int) -> Iterator[Change]:
        options = self.options
        given = options.optimizer_step is not None or options.optimizer_state is not None
        # gradients of an FSDP unit go together, which the account before a trial does not know
        if given or is_sharded(self.trainer.strategy):
            return
        sizes = gradient_sizes(self.module)
        takes_less = least_bytes - sum(sizes) <= self.budget_bytes
        optimizers, keeps = self.trainer.optimizers, bool(options.keep_gradients)
        if not takes_less or hindrance(self.trainer, self.module, optimizers, keeps_gradients=keeps):
            return
        found = predict(self.trainer.optimizers, inside=True)
        if found is not None:
            account = self.account.stepping_inside(sizes, found)
            peak_bytes = planned_peak_bytes(account, self.budget_bytes, options.policy)
            yield Change(MEMORY, "optimizer_step", "in_backward", account, peak_bytes)

    def _default_rank(self) -> str:
        """The default instead of ``rank=None``, in words; empty where it could decompose no layer."""
        options, module = self.options, self.module
        dense = options.rank is None and options.choices is None and not factorized_names(module)
        if not dense or not replace(options, rank=IF_NEEDED).fits_budget or not module.automatic_optimization:
            return ""
        try:
            check_strategy(self.trainer.strategy, cuts=True, chooses=True, allow_untested=options.allow_untested)
            layers = find_layers(module, options.select)
        except ConfigError:
            return ""
        open_layers = [layer for layer in layers if not layer.refusal]
        return "leave rank=None out, and layers are decomposed where nothing exact fits" if open_layers else ""

    def _lower_rank(self, least_bytes: int) -> str:
        """The share of the weights that would fit, in words; empty where fewer weights are not enough."""
        parameters = list(self.module.parameters())
        gradients = local_bytes(p for p in parameters if p.requires_grad)
        away = any(state_away_of(optimizer) is not None for optimizer in self.trainer.optimizers)
        state = 0 if away else self.account.optimizer.state  # buffers of a link stay, whatever the rank
        own = local_bytes(parameters) + gradients + state
        share = int(100 * (1 - (_ROOM * least_bytes - self.budget_bytes) / max(own, 1)))
        return f", or use a rank that leaves about {share}% of the weights" if share > 0 else ""


def optimizer_does_not_fit(
    account: BatchAccount, budget_bytes: int, step_bytes: int = 0, rank: str = ""
) -> InfeasibleBudgetError:
    """The error for a budget that the optimizer's step breaks, whatever the plan of forward and backward.

    Args:
        account: The batch.
        budget_bytes: The budget.
        step_bytes: The least peak of forward and backward; 0 where it is not known.
        rank: Further words for the hint.
    """
    least = max(account.rest_bytes, step_bytes)
    return InfeasibleBudgetError(
        f"The optimizer's step does not fit the budget of {format_bytes(budget_bytes)}: weights, gradients, its state "
        f"and the batch take {format_bytes(account.end_bytes)}, its temporaries "
        f"{format_bytes(account.optimizer.temporary)}, together {format_bytes(account.rest_bytes)}.",
        f"Raise memory_budget to {format_roomy(least)}{rank}.",
        least_peak_bytes=least,
    )
