"""Foreseen before training: whether batches may run in parts, whether these keep a budget, or what else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.trainer.options import ELSEWHERE, CallbackOptions
from ctdr_lightning.trainer.training_step.optimizer.resident import gradient_sizes
from ctdr_lightning.trainer.training_step.sub_batches.checks import (
    batch_norm_of,
    check_mean,
    computes_in_half,
    sub_batch_hindrance,
)
from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks

_IN_PARTS = "batches run in parts: exact if their loss is a mean over samples"
_ELSEWHERE = "tensors that do not fit wait off the device, which is exact"


def exact_options(
    options: CallbackOptions, trainer: Any, module: LightningModule, error: InfeasibleBudgetError
) -> tuple[CallbackOptions, str] | None:
    """The arguments for dense layers and one more exact means, and this in words; None where there is none.

    Batches whose tensors may wait elsewhere run whole wherever they fit so.

    Args:
        options: The callback's.
        trainer: About to train.
        module: The model.
        error: The refusal of the whole batch on its device.
    """
    moved = options.elsewhere(trainer.strategy.root_device.type) if error.means == ELSEWHERE else None
    cut = options_in_parts(options, trainer, module)
    if moved is not None:
        return replace(moved, sub_batches="auto" if cut is not None else None), _ELSEWHERE
    return (cut, _IN_PARTS) if cut is not None else None


def options_in_parts(options: CallbackOptions, trainer: Any, module: LightningModule) -> CallbackOptions | None:
    """The arguments for batches in parts; None where an argument, the module or the trainer speaks against these.

    Args:
        options: The callback's.
        trainer: About to train.
        module: The model.
    """
    cut = options.in_parts()
    hindered = cut is None or batch_norm_of(module) or sub_batch_hindrance(trainer, module)
    return None if hindered else cut


def fits_in_parts(
    trainer: Any,
    module: LightningModule,
    batch: Any,
    step: Callable[[Any], Any],
    account: Callable[[Any], BatchAccount],
    budget_bytes: int,
) -> bool:
    """Whether a batch keeps a budget in parts, with the gradients of the whole: its loss is a mean over its samples.

    Args:
        trainer: About to train.
        module: A copy of the model.
        batch: It can be cut.
        step: From a batch to the result of ``training_step``.
        account: From a part of the batch to the account of its step.
        budget_bytes: The budget.
    """
    with trainer.precision_plugin.train_step_context():
        half = computes_in_half(module.device.type, module.parameters())
    peaks = SubBatchPeaks(lambda inputs: account(inputs[0][0]), gradient_sizes(module), ((batch,), {}), budget_bytes)
    try:
        unknown = check_mean(module, step, batch, half=half)
        return not unknown and peaks.fewest(whole=False) > 0
    except Exception:  # no mean; or whatever the user's step raises on tensors without data, as on a smaller batch
        return False
