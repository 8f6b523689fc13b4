"""Measures a logged validation metric outside the training loop, on a copy, by a Trainer of its own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.randomness import isolated


def measure(trainer: Any, module: nn.Module, monitor: str) -> float:
    """Validate a module and read one metric; logs, progress, random state and the module stay as they are.

    Args:
        trainer: The running trainer, whose validation data, precision and device are used.
        module: A LightningModule; validated as a copy.
        monitor: Name of a metric that ``validation_step`` logs.

    Returns:
        The metric, the mean over ranks.

    Raises:
        ConfigError: If there is no validation data, or no such metric is logged.
    """
    if not trainer.enable_validation or trainer.val_dataloaders is None:
        raise ConfigError(
            f"recovery.reference='measure' needs validation data to measure {monitor!r}.",
            "Give fit() a validation dataloader, or give the reference as a number.",
        )
    device = trainer.strategy.root_device
    with isolated(), _silence():
        inner = _evaluator(trainer, device)
        inner.validate(_ready_to_log(module), dataloaders=trainer.val_dataloaders, verbose=False)
    value = logged_metric(inner.callback_metrics, monitor).to(device, torch.float32)
    return float(trainer.strategy.reduce(value, reduce_op="mean") if trainer.world_size > 1 else value)


def logged_metric(metrics: dict[str, torch.Tensor], monitor: str) -> torch.Tensor:
    """One logged metric.

    Raises:
        ConfigError: If it was not logged.
    """
    if monitor not in metrics:
        raise ConfigError(
            f"recovery.monitor={monitor!r} is not logged in validation.",
            f"Logged: {', '.join(map(str, metrics)) or 'nothing'}.",
        )
    return metrics[monitor].detach()


def _ready_to_log(module: nn.Module) -> Any:
    """A copy that logs its own metrics.

    Lightning finds a logged Metric by its id, in a table that it makes at the first one; the copied table has the ids
    of the module's metrics. So the copy gives the name along.
    """
    copy: Any = duplicate(module)
    names = {id(part): name for name, part in copy.named_modules() if isinstance(part, Metric)}
    log = copy.log

    def log_by_name(name: str, value: Any, *args: Any, **options: Any) -> None:
        if id(value) in names:
            options.setdefault("metric_attribute", names[id(value)])
        log(name, value, *args, **options)

    copy.log = log_by_name
    return copy


def _evaluator(trainer: Any, device: torch.device) -> Any:
    return type(trainer)(
        accelerator=device.type if device.type in ("cpu", "cuda", "mps") else "auto",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=trainer.precision,
        limit_val_batches=trainer.limit_val_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


@contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
