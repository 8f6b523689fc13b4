"""Surroundings of a ``training_step`` without training: a stub trainer, and a log that is ignored."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import SGD, Optimizer
from torchmetrics import Metric, MetricCollection

_SILENT = ("lightning.pytorch", "lightning.fabric")


def attach_fake_trainer(module: LightningModule) -> None:
    """Let a module's ``training_step`` run alone.

    It finds a trainer that trains nothing, logs nowhere, and its metrics return zero: they read values, which fake
    tensors do not have, and take no part in the backward. Its optimizers are made anew where the step asks for them.

    Args:
        module: A copy: its ``log``, its trainer, its optimizers and its metrics stay replaced.
    """
    module.trainer = _trainer()
    module.trainer.training = True
    for part in module.modules():
        if isinstance(part, LightningModule):
            part.log = part.log_dict = _nothing  # type: ignore[method-assign]
            part.optimizers = partial(_one_or_all, part)  # type: ignore[method-assign]
        if isinstance(part, Metric | MetricCollection):
            part.forward = part.update = _zero  # type: ignore[method-assign, assignment]


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """The optimizers that a module configures; none where that cannot be done before training.

    Args:
        module: A copy of the model.
    """
    try:
        return list(_optimizers_in(module.configure_optimizers()))
    except Exception:  # the user's code may ask for anything that comes after setup
        return []


def _optimizers_in(made: Any) -> Iterator[Optimizer]:
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, dict):
        yield from _optimizers_in(made.get("optimizer"))
    elif isinstance(made, list | tuple):
        for part in made:
            yield from _optimizers_in(part)


def _one_or_all(module: LightningModule, use_pl_optimizer: bool = True) -> Any:
    """As a LightningModule has them: a step that logs the learning rate asks for it."""
    found = optimizers_of(module) or [SGD(module.parameters(), lr=0.0)]
    return found[0] if len(found) == 1 else found


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
