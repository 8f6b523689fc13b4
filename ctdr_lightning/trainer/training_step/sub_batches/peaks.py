"""Memory of a batch that runs as several sub-batches: one of them is recorded on fake tensors, and planned.

The sub-batch size is chosen as in moDNN (Chen et al., DATE 2018): the largest whose working set fits the
budget, so the fewest sub-batches, and gradients that are those of the whole batch. Left out: another size for each
layer, and convolution algorithms by their workspace, which the libraries choose; moDNN's transfers are `offload=`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from ctdr_lightning.basics.errors import ConfigError, first_line
from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.memory import Trace, record_fake
from ctdr_lightning.memory.account.advice import MEMORY, Change
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.account.fit import planned_peak_bytes
from ctdr_lightning.memory.largest_batch import largest
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.trainer.fake_trainer import attach_fake_trainer
from ctdr_lightning.trainer.randomness import isolated
from ctdr_lightning.trainer.training_step.layers import loss_of
from ctdr_lightning.trainer.training_step.sub_batches.parts import n_samples, parts_of

# As for a budget that is asked for: 1 % to spare.
_ROOM = 1.01


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class SubBatchPeaks:
    """The peaks of one batch by the number of its sub-batches; each is found once.

    Args:
        account: From the arguments of a step, the batch first, to the account of a batch.
        sizes: Bytes of each parameter that is trained.
        inputs: The arguments of the whole batch's step.
        budget_bytes: The budget.
        policy: The memory policy's name.
        least_samples: Fewest samples of a part.
    """

    def __init__(
        self,
        account: Callable[[Inputs], BatchAccount],
        sizes: list[int],
        inputs: Inputs,
        budget_bytes: int,
        policy: str = "auto",
        least_samples: int = 1,
    ) -> None:
        self._account_of, self._sizes, self._inputs = account, sizes, inputs
        self._limit_bytes, self._policy, self._least_samples = int(budget_bytes / _ROOM), policy, least_samples
        self._peaks: dict[int, int] = {}
        self._known: dict[int, BatchAccount] = {}

    @property
    def n_samples(self) -> int:
        """Number of samples in the batch."""
        return n_samples(self._inputs[0][0])

    @property
    def most(self) -> int:
        """The largest number of sub-batches, at least 1."""
        return max(self.n_samples // self._least_samples, 1)

    def peak_bytes(self, number: int) -> int:
        """The peak in so many sub-batches, under the best plan; more than the budget where none fits.

        Args:
            number: How many; 1 is the whole batch.

        Raises:
            ConfigError: If the batch cannot be cut, or the step not be recorded on fake tensors.
        """
        if number not in self._peaks:
            self._peaks[number] = planned_peak_bytes(self.account(number), self._limit_bytes, self._policy)
        return self._peaks[number]

    def fewest(self, *, whole: bool = True) -> int:
        """The smallest number of sub-batches that fits the budget; 0 where none does.

        Args:
            whole: Whether the whole batch may be the answer.

        Raises:
            ConfigError: As for `peak_bytes`.
        """
        if whole and self._fits(1):
            return 1
        most = self.most
        # weights alone exceed it, perhaps: each other number is a recording
        if (most == 1 and not whole) or self.account(most).floor_bytes > self._limit_bytes:
            return 0
        # tight plans take seconds: numbers that no plan can meet are skipped first
        least = largest(lambda number: self.account(number).floor_bytes > self._limit_bytes, 1, most) + 1
        number = least + largest(lambda more: not self._fits(least - 1 + more), 0, most - least + 1)
        return number if number <= most else 0

    def change(self) -> Change | None:
        """The fewest parts that fit, as a change; None where none do, or the batch cannot be cut."""
        try:
            number = self.fewest(whole=False)
        except ConfigError:  # a batch that cannot be cut, or a step that needs values
            return None
        if not number:
            return None
        return Change(MEMORY, "sub_batches", number, self.account(number), self.peak_bytes(number))

    def _fits(self, number: int) -> bool:
        return self.peak_bytes(number) <= self._limit_bytes

    def account(self, number: int) -> BatchAccount:
        """The batch's memory in so many sub-batches.

        Args:
            number: How many; 1 is the whole batch.

        Raises:
            ConfigError: As for `peak_bytes`.
        """
        if number not in self._known:
            self._known[number] = self._looked_at(number)
        return self._known[number]

    def _looked_at(self, number: int) -> BatchAccount:
        (batch, *more), named = self._inputs
        inputs = ((parts_of(batch, number)[0].batch, *more), named)
        account = self._account_of(inputs)
        return account if number == 1 else account.adding(self._sizes)


def fake_steps(trainer: Any, module: LightningModule, lean_step: LeanStep) -> Callable[[Inputs], Trace]:
    """Records a module's own step on fake tensors, as its trainer would run it.

    Args:
        trainer: In training.
        module: The model; a copy of it runs.
        lean_step: Layers whose outputs are left out, and modules in tiles.
    """

    def step(twin: Any, inputs: Inputs) -> Tensor:
        attach_fake_trainer(twin)
        twin.trainer = trainer
        args, kwargs = inputs
        with trainer.precision_plugin.train_step_context(), lean_step.of(twin):
            # the module's own step is wrapped on the instance, and the copy has that wrapper
            loss = loss_of(type(twin).training_step(twin, *args, **kwargs))
        if loss is None:
            raise ConfigError("training_step returned no loss.", "Return one.")
        return loss

    def recorded(inputs: Inputs) -> Trace:
        try:
            with isolated(), no_dispatch_modes():  # a meter outside would count the fakes
                return record_fake(module, inputs, step, reads_values=True)
        except Exception as error:  # the user's step may raise anything where there are no values
            raise ConfigError(
                f"The memory of a sub-batch cannot be predicted: {first_line(error)}.",
                "Give a number, such as sub_batches=4.",
            ) from error

    return recorded
