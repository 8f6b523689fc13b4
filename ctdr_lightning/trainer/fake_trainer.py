"""Surroundings of a ``training_step`` without training: a stub trainer, and a log that is ignored."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric, MetricCollection

_SILENT = ("lightning.pytorch", "lightning.fabric")


def attach_fake_trainer(module: LightningModule) -> None:
    """Let a module's ``training_step`` run alone.

    It finds a trainer that trains nothing, logs nowhere, and its metrics return zero: they read values, which fake
    tensors do not have, and take no part in the backward.

    Args:
        module: A copy: its ``log``, its trainer and its metrics stay replaced.
    """
    module.trainer = _trainer()
    module.trainer.training = True
    for part in module.modules():
        if isinstance(part, LightningModule):
            part.log = part.log_dict = _nothing  # type: ignore[method-assign]
        if isinstance(part, Metric | MetricCollection):
            part.forward = part.update = _zero  # type: ignore[method-assign, assignment]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(())


@cache
def _trainer() -> Trainer:
    loggers = [logging.getLogger(name) for name in _SILENT]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:  # which devices there are is no news: nothing will run on them
            logger.setLevel(logging.WARNING)
        return Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
