"""``--sub-batches``: a batch planned as the callback would run it in several parts, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.account.batch import BatchAccount

if TYPE_CHECKING:
    from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks


def read_number(text: str) -> int | str:
    """``"auto"``, or a number from 1 on.

    Raises:
        ConfigError: If it is anything else.

    Example:
        >>> read_number("4")
        4
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--sub-batches {text!r} is not a number of sub-batches.", "Write 4, or auto.")
    return int(text)


def sub_batch_peaks(
    model: nn.Module, batch: Any, account: Callable[[Any], BatchAccount], budget_bytes: int, policy: str
) -> SubBatchPeaks:
    """A batch's memory by the number of its sub-batches.

    Args:
        model: In training mode.
        batch: The batch.
        account: From a batch to its account, on its machine.
        budget_bytes: The budget.
        policy: The memory policy's name.

    Raises:
        ConfigError: If the model normalises each sample by its whole batch.
    """
    # imported late: they import Lightning, which plans of whole batches can do without
    from ctdr_lightning.trainer.training_step.sub_batches.checks import batch_norm_of
    from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks

    by_batch = batch_norm_of(model)
    if by_batch:
        raise ConfigError(
            f"--sub-batches is not supported here: {by_batch} normalises each sample by its whole batch.",
            "Use GroupNorm or LayerNorm, or leave --sub-batches out.",
        )
    sizes = [p.nbytes for p in model.parameters() if p.requires_grad]
    return SubBatchPeaks(lambda inputs: account(inputs[0][0]), sizes, ((batch,), {}), budget_bytes, policy)
