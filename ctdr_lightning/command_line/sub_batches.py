"""``--sub-batches``: a batch planned as the callback would run it in several parts, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import Trace

if TYPE_CHECKING:
    from ctdr_lightning.trainer.training_step.sub_batch_peaks import SubBatchPeaks


def read_number(text: str) -> int | str:
    """``"auto"``, or a number from 1 on.

    Raises:
        ConfigError: When it is anything else.

    Example:
        >>> read_number("4")
        4
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--sub-batches {text!r} is no number of sub-batches.", "Write 4, or auto.")
    return int(text)


def sub_batch_peaks(
    model: nn.Module, batch: Any, recorded: Callable[[Any], Trace], budget_bytes: int, policy: str
) -> SubBatchPeaks:
    """What a batch takes by the number of its sub-batches.

    Args:
        model: In training mode.
        batch: The batch.
        recorded: From a batch to its trace, on its machine.
        budget_bytes: The budget.
        policy: The memory policy's name.

    Raises:
        ConfigError: When the model normalises each sample by its whole batch.
    """
    # imported late: they import Lightning, which plans of whole batches can do without
    from ctdr_lightning.trainer.training_step.batch_needs import BatchNeeds
    from ctdr_lightning.trainer.training_step.optimizer_bytes import OptimizerBytes
    from ctdr_lightning.trainer.training_step.sub_batch_checks import batch_norm_of
    from ctdr_lightning.trainer.training_step.sub_batch_peaks import SubBatchPeaks

    by_batch = batch_norm_of(model)
    if by_batch:
        raise ConfigError(
            f"--sub-batches cannot be: {by_batch} normalises each sample by its whole batch.",
            "Use GroupNorm or LayerNorm, or leave --sub-batches out.",
        )
    sizes = [p.nbytes for p in model.parameters() if p.requires_grad]
    return SubBatchPeaks(
        lambda inputs: recorded(inputs[0][0]),
        sizes,
        ((batch,), {}),
        lambda trace, inputs: BatchNeeds(trace, OptimizerBytes(0, 0)),
        budget_bytes,
        policy,
    )
