"""The choice for a budget, kept in the run's folder, so that the same question has the same answer at once.

A search measures times, and near a limit two searches may choose differently. A kept choice is not searched for again:
its step is priced, planned and timed anew, and its factors are computed and refined. Where it no longer keeps the
limits, ranks are searched for as if nothing were there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

import ctdr_lightning
from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.basics.nests import leaves_of
from ctdr_lightning.joint.budget_fit import BudgetFit
from ctdr_lightning.trainer.options import CallbackOptions

_log = logging.getLogger(__name__)
_FOLDER = "ctdr_choices"
_MOST_FILES = 8  # the oldest ones go: without a seed each run asks another question


class KeptChoice:
    """The answers in a run's folder to one question.

    Attributes:
        path: Of the answer's file; None where nothing is kept.

    Args:
        trainer: About to train; nothing is kept where it has no logger and saves no checkpoint.
        question: Everything that the answer depends on, as primitives.
        shown: Whether a kept answer is named on the console.
    """

    def __init__(self, trainer: Any, question: Any, *, shown: bool = True) -> None:
        self._shown = shown
        text, folder = json.dumps(question, sort_keys=True, default=str), _folder(trainer)
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self.path = folder / name if folder is not None else None

    def answer(self, ask: Callable[[BudgetFit | None], BudgetFit]) -> BudgetFit:
        """The kept answer where there is one, else a new one.

        Args:
            ask: From the kept answer, or None, to one for the model of this run.
        """
        kept = self._read()
        if kept is None:
            return self._write(ask(None))
        try:
            found = ask(kept)
        except CTDRError as error:
            _log.info("CTDR: the choice in %s does not hold any more (%s).", self.path, error)
            return self._write(ask(None))
        if self._shown:
            rank_zero_info(f"CTDR: an earlier run chose this for the same model and budget:\n{self.path} keeps it.")
        return replace(found, considered=kept.considered)

    def _read(self) -> BudgetFit | None:
        if self.path is None or not self.path.is_file():
            return None
        try:
            return BudgetFit.from_json(self.path)
        except CTDRError:  # of another version
            return None

    def _write(self, fit: BudgetFit) -> BudgetFit:
        if self.path is None:
            return fit
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fit.to_json(self.path)
            for old in sorted(self.path.parent.glob("*.json"), key=_age)[:-_MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:  # a folder that cannot be written, or a path that is no local one
            _log.info("CTDR: the choice of ranks is not kept: %s", error)
        return fit


def _folder(trainer: Any) -> Path | None:
    """Beside the logger's runs; None where a run leaves no files."""
    if trainer.fast_dev_run or not (trainer.loggers or trainer.checkpoint_callbacks):
        return None
    saved = next((logger.save_dir for logger in trainer.loggers if logger.save_dir), trainer.default_root_dir)
    return None if "://" in str(saved) else Path(saved) / _FOLDER  # a bucket


def question_of(
    trainer: Any, options: CallbackOptions, module: LightningModule, optimizer: Optimizer | None, batch: Any
) -> list[Any]:
    """Everything that a choice for a budget depends on, as primitives; weights by their sums.

    Args:
        trainer: About to train.
        options: The callback's.
        module: Dense.
        optimizer: Of the module; None where it cannot be made yet.
        batch: The first one.
    """
    asked = {name: value for name, value in options.to_dict().items() if name != "verbose"}
    device, code = trainer.strategy.root_device, getattr(type(module).training_step, "__code__", None)
    return [
        [ctdr_lightning.__version__, torch.__version__, torch.get_num_threads()],
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        [trainer.precision, trainer.accumulate_grad_batches, trainer.gradient_clip_val],
        [type(trainer.strategy).__name__, trainer.world_size],
        [asked, type(module).__qualname__, str(module)],
        code.co_code.hex() if code is not None else "",
        [repr(optimizer), [_looks(leaf) for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]],
        list(_sums(module)),
    ]  # fmt: skip


def _looks(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype)]


def _sums(module: LightningModule) -> Iterator[list[Any]]:
    """Each tensor with its sum and its norm, which need no copy of it."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        known = [name, *_looks(tensor), tensor.requires_grad]
        if not tensor.is_meta:
            known.append(f"{tensor.detach().sum(dtype=torch.float64).item():.9g}")
        if tensor.is_floating_point() and not tensor.is_meta:
            known.append(f"{torch.linalg.vector_norm(tensor.detach()).item():.6g}")
        yield known


def _age(path: Path) -> float:
    return path.stat().st_mtime
