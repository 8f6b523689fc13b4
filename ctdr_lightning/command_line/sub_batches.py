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
    """
    # imported late: they import Lightning, which plans of whole batches can do without
    from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import LEAST_ASKED, batch_norm_of
    from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks

    sizes, least = [p.nbytes for p in model.parameters() if p.requires_grad], LEAST_ASKED if batch_norm_of(model) else 1
    return SubBatchPeaks(lambda inputs: account(inputs[0][0]), sizes, ((batch,), {}), budget_bytes, policy, least)


def parts_in_words(model: nn.Module, samples: int, number: int) -> str:
    """A line on the parts of a batch, and one on BatchNorm, which then normalises each of them by itself.

    Example:
        >>> print(parts_in_words(nn.Linear(4, 4), 6, 2), end="")
        The batch of 6 runs as 2 sub-batches of 3 samples or less.
    """
    from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import batch_norm_of

    if number < 2:
        return f"The batch of {samples} runs whole.\n"
    norm = batch_norm_of(model)
    apart = f"{norm} normalises each by itself, which memory=Memory(batch_norm_in_parts=True) allows.\n" if norm else ""
    return f"The batch of {samples} runs as {number} sub-batches of {-(-samples // number)} samples or less.\n{apart}"
