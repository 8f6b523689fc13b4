"""Numbers, reports and pictures for a trainer's loggers, by their abilities."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ctdr_lightning.basics import files
from ctdr_lightning.pages.run_folder import write_run
from ctdr_lightning.pages.run_page import RunParts

_log = logging.getLogger(__name__)


def log_scalars(trainer: Any, module: Any, values: Mapping[str, Any], **when: bool) -> None:
    """Log numbers through the module, the largest of all ranks; nothing where the trainer allows no logging.

    Args:
        trainer: In training.
        module: The LightningModule.
        values: By name, the same names on every rank.
        when: ``on_step`` or ``on_epoch``.
    """
    if values and not trainer.barebones:
        when = {"on_step": False, "on_epoch": False, **when}
        module.log_dict(values, reduce_fx="max", sync_dist=trainer.world_size > 1, batch_size=1, **when)


def publish_text(loggers: Sequence[Any], name: str, text: str, step: int) -> None:
    """Give a text to every logger.

    TensorBoard shows it, MLflow and Weights & Biases store it, and every logger with a folder gets a file.

    Args:
        loggers: The trainer's loggers.
        name: Such as ``"ctdr/report"``.
        text: Its contents.
        step: Step it belongs to.
    """
    for logger in loggers:
        _try(logger, partial(_text_to, logger, name, text, step))


def publish_figure(loggers: Sequence[Any], name: str, figure: Any, step: int) -> None:
    """Give a matplotlib figure to every logger that takes pictures, and write it to every logger's folder."""
    for logger in loggers:
        _try(logger, partial(_figure_to, logger, name, figure, step))


def publish_run(loggers: Sequence[Any], parts: RunParts) -> None:
    """Write a run's record, its plan and its HTML page into every logger's folder."""
    for logger in loggers:
        folder = _folder(logger)
        if folder is not None:
            _try(logger, partial(write_run, folder, parts))


def _text_to(logger: Any, name: str, text: str, step: int) -> None:
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_text"):  # Weights & Biases
        logger.log_text(key=name, columns=["text"], data=[[text]], step=step)
    elif hasattr(experiment, "log_text"):  # MLflow
        experiment.log_text(logger.run_id, text, f"{name}.txt")
    elif hasattr(experiment, "add_text"):  # TensorBoard
        experiment.add_text(name, f"<pre>{text}</pre>", step)
    folder = _folder(logger)
    if folder is not None:
        files.write_text(folder / f"{name}.txt", text + "\n")


def _figure_to(logger: Any, name: str, figure: Any, step: int) -> None:
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[figure], step=step)
    elif hasattr(experiment, "log_figure"):
        experiment.log_figure(logger.run_id, figure, f"{name}.png")
    elif hasattr(experiment, "add_figure"):
        experiment.add_figure(name, figure, step, close=False)
    folder = _folder(logger)
    if folder is not None:
        files.write_bytes(folder / f"{name}.png", _png(figure))


def _folder(logger: Any) -> Path | None:
    folder = getattr(logger, "log_dir", None)
    return Path(folder) if isinstance(folder, str | Path) else None


def _png(figure: Any) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _try(logger: Any, send: Callable[[], object]) -> None:
    """A report is not worth a run: whatever a logger's service says is noted, and training goes on."""
    try:
        send()
    except Exception as error:
        _log.warning("CTDR: %s did not take a report: %s", type(logger).__name__, error)
