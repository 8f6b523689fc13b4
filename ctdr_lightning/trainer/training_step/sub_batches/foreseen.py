"""Foreseen before training: whether batches may run in parts, and whether these keep a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from ctdr_lightning.basics.errors import ConfigError, first_line
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.trainer.options import IN_PARTS, NORMS_IN_PARTS, CallbackOptions
from ctdr_lightning.trainer.training_step.optimizer.resident import gradient_sizes
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import LEAST_SAMPLES, batch_norm_of
from ctdr_lightning.trainer.training_step.sub_batches.checks import check_mean, computes_in_half, sub_batch_hindrance
from ctdr_lightning.trainer.training_step.sub_batches.own_changes import OwnChanges
from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks

NO_NUMBER_FITS = "no number of them fits"


def parts_means(options: CallbackOptions, trainer: Any, module: LightningModule) -> str:
    """``IN_PARTS``, or ``NORMS_IN_PARTS``; empty where an argument, the module or the trainer speaks against parts.

    Args:
        options: The callback's.
        trainer: About to train.
        module: The model.
    """
    if options.in_parts() is None or sub_batch_hindrance(trainer, module):
        return ""
    if not batch_norm_of(module):
        return IN_PARTS
    return "" if options.batch_norm_in_parts is False else NORMS_IN_PARTS


def why_not_in_parts(
    trainer: Any,
    module: LightningModule,
    batch: Any,
    step: Callable[[Any], Any],
    account: Callable[[Any], BatchAccount],
    budget_bytes: int,
) -> str:
    """Why a batch keeps no budget in parts whose loss is the mean over their samples; empty where it does.

    Parts that BatchNorm normalises by themselves have 16 samples or more.

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
    least = LEAST_SAMPLES if batch_norm_of(module) else 1
    try:
        checked = check_mean(module, step, batch, half=half)
        if checked.unknown:
            return checked.unknown
        copied_bytes = 2 * OwnChanges(module, checked.changed).n_bytes  # the retry's copies, too

        def of_part(inputs: Any) -> BatchAccount:
            found = account(inputs[0][0])
            return replace(found, copied_bytes=found.copied_bytes + copied_bytes)

        peaks = SubBatchPeaks(of_part, gradient_sizes(module), ((batch,), {}), budget_bytes, least_samples=least)
        return "" if peaks.fewest(whole=False) > 0 else NO_NUMBER_FITS
    except ConfigError as error:  # no mean
        return error.problem
    except Exception as error:  # whatever the user's step raises on tensors without data, as on a smaller batch
        return first_line(error)
