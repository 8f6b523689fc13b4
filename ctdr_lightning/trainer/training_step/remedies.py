"""What to change where a budget cannot be met, from what leaves every result as it is to what changes the model.

Whatever is named was tried: its peak is predicted as that of the run would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.units import format_bytes, format_roomy
from ctdr_lightning.memory.helpful_places import place_that_fits
from ctdr_lightning.memory.holders.optimizer_state import state_away_of
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.batch_needs import BatchNeeds, planned_peak_bytes
from ctdr_lightning.trainer.training_step.optimizer_bytes import elsewhere, leaner, predict_inside
from ctdr_lightning.trainer.training_step.resident import local_bytes
from ctdr_lightning.trainer.training_step.step_in_backward import hindrance
from ctdr_lightning.trainer.training_step.sub_batch_peaks import SubBatchPeaks

# As for a budget that is asked for: 1 % to spare.
_ROOM = 1.01


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that leaves every result as it is.

    Attributes:
        words: What to write.
        peak_bytes: What a batch takes with it.
        how: What is to be known besides.
    """

    words: str
    peak_bytes: int
    how: str = ""


class Remedies:
    """Looks for what would make a batch fit.

    Args:
        trainer: In training.
        module: The model.
        options: The callback's.
        needs: The batch, as it is.
        budget_bytes: The budget.
        sub_batches: What the batch takes in sub-batches; None where it cannot be cut.
    """

    def __init__(
        self,
        trainer: Any,
        module: LightningModule,
        options: CallbackOptions,
        needs: BatchNeeds,
        budget_bytes: int,
        sub_batches: SubBatchPeaks | None = None,
    ) -> None:
        self._trainer, self._module, self._options = trainer, module, options
        self._needs, self._budget_bytes, self._sub_batches = needs, budget_bytes, sub_batches

    def nearest(self, least_bytes: int) -> str:
        """The first change that makes the batch fit, with its figure; empty where none does.

        Args:
            least_bytes: The least that forward and backward take as they are.
        """
        for found in self._each(least_bytes):
            if found.peak_bytes <= self._budget_bytes:
                return f"use {found.words}, with which it takes {format_bytes(found.peak_bytes)}{found.how}"
        return ""

    def lower_rank(self, least_bytes: int) -> str:
        """How far the weights would have to shrink, where that can be enough; empty elsewhere."""
        parameters = list(self._module.parameters())
        gradients = local_bytes(p for p in parameters if p.requires_grad)
        away = any(state_away_of(optimizer) is not None for optimizer in self._trainer.optimizers)
        state = 0 if away else self._needs.optimizer.state  # buffers of a link stay, whatever the rank
        own = local_bytes(parameters) + gradients + state
        share = int(100 * (1 - (_ROOM * least_bytes - self._budget_bytes) / max(own, 1)))
        return f", or use a rank that leaves about {share}% of the weights" if share > 0 else ""

    def _each(self, least_bytes: int) -> Iterator[Remedy]:
        """The changes, those that cost no time first, each with what it leads to."""
        yield from self._settings(least_bytes)
        yield from self._step_inside(least_bytes)
        yield from self._state_elsewhere(least_bytes)
        yield from self._places()
        yield from self._in_sub_batches()

    def _settings(self, least_bytes: int) -> Iterator[Remedy]:
        if not self._needs.in_backward:
            for words, found in leaner(self._trainer.optimizers):
                yield Remedy(words, self._with_optimizer(found.state, found.temporary, least_bytes))

    def _state_elsewhere(self, least_bytes: int) -> Iterator[Remedy]:
        away = elsewhere(self._trainer.optimizers) if self._options.optimizer_step is None else None
        if away is not None:
            words, found = away
            yield Remedy(words, self._with_optimizer(found.state, found.temporary, least_bytes))

    def _with_optimizer(self, state: int, temporary: int, least_bytes: int) -> int:
        """The peak where the optimizer takes something else: the same plan, with another state beside it."""
        less = self._needs.optimizer.state - state
        return max(least_bytes - less, self._needs.end_bytes - less + temporary)

    def _step_inside(self, least_bytes: int) -> Iterator[Remedy]:
        options = self._options
        if options.optimizer_step is not None or options.optimizer_state is not None:
            return
        sizes = [p.nbytes for p in self._module.parameters() if p.requires_grad]
        takes_less = least_bytes - sum(sizes) <= self._budget_bytes
        if not takes_less or hindrance(self._trainer, self._module, keeps_gradients=bool(options.keep_gradients)):
            return
        found = predict_inside(self._trainer.optimizers)
        if found is not None:
            peak_bytes = self._planned(self._needs.stepping_inside(sizes, found))
            yield Remedy("CTDRCallback(..., optimizer_step='in_backward')", peak_bytes)

    def _places(self) -> Iterator[Remedy]:
        if self._needs.rest_bytes <= self._budget_bytes:
            given = self._options.places().on(self._trainer.strategy.root_device.type)
            found = place_that_fits(self._needs.standing, self._budget_bytes, given, self._options.policy)
            if found is not None:
                argument, value, peak_bytes = found
                yield Remedy(f"CTDRCallback(..., {argument}={value!r})", max(peak_bytes, self._needs.rest_bytes))

    def _in_sub_batches(self) -> Iterator[Remedy]:
        if self._needs.rest_bytes > self._budget_bytes or self._sub_batches is None:
            return
        try:
            number = self._sub_batches.fewest(whole=False)
        except ConfigError:  # a batch that cannot be cut, or a step that needs values
            return
        if number:
            peak_bytes = self._sub_batches.peak_bytes(number)
            yield Remedy("CTDRCallback(..., sub_batches='auto')", peak_bytes, f" in {number} sub-batches")

    def _planned(self, needs: BatchNeeds) -> int:
        return planned_peak_bytes(needs, self._budget_bytes, self._options.policy)


def optimizer_does_not_fit(
    needs: BatchNeeds, budget_bytes: int, step_bytes: int = 0, remedies: Remedies | None = None
) -> InfeasibleBudgetError:
    """The error for a budget that the optimizer's step breaks, whatever the plan of forward and backward.

    Args:
        needs: The batch.
        budget_bytes: The budget.
        step_bytes: The least that forward and backward take; 0 where it is not known.
        remedies: What would help; None looks for nothing.
    """
    least = max(needs.rest_bytes, step_bytes)
    rank = remedies.lower_rank(least) if remedies is not None else ""
    error = InfeasibleBudgetError(
        f"The optimizer's step does not fit the budget of {format_bytes(budget_bytes)}: weights, gradients, its state "
        f"and the batch take {format_bytes(needs.end_bytes)}, its temporaries "
        f"{format_bytes(needs.optimizer.temporary)}, together {format_bytes(needs.rest_bytes)}.",
        f"Raise memory_budget to {format_roomy(least)}{rank}.",
        least_peak_bytes=least,
    )
    return error.but_first(remedies.nearest(step_bytes)) if remedies is not None else error
