"""Re-estimates a LightningModule's BatchNorm statistics on its own training batches, as the model is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.recovery.batchnorm import copy_statistics, reestimate, tracked
from ctdr_lightning.trainer.accuracy import rehearsal
from ctdr_lightning.trainer.modules import overrides
from ctdr_lightning.trainer.randomness import isolated


class Estimator:
    """Runs training batches through a copy, by ``validation_step`` where that takes them, else by ``training_step``.

    Args:
        n_batches: How many; 0: nothing is done.
        copied: Copies a module.
    """

    def __init__(self, n_batches: int, copied: Callable[[LightningModule], LightningModule] = duplicate) -> None:
        self._n_batches = n_batches
        self._copied = copied
        self._evaluates = True

    def run(self, trainer: Any, module: LightningModule) -> bool:
        """Re-estimate without dropout and other parts of a training step. Returns whether there was anything to do."""
        if self._n_batches == 0 or not tracked(module):
            return False
        self._evaluates &= overrides(module, "validation_step")
        with isolated():
            copy = self._evaluated(trainer, module) if self._evaluates else None
            if copy is None:
                copy = rehearsal.rehearse(module, trainer, self._copied)
                self._run(trainer, copy, "training_step")
        copy_statistics(copy, module)
        return True

    def _evaluated(self, trainer: Any, module: LightningModule) -> LightningModule | None:
        """A copy re-estimated by ``validation_step``; None where that is not made for training batches."""
        copy = rehearsal.rehearse(module, trainer, self._copied).eval()
        try:
            with rehearsal.evaluating(trainer):
                missed = tracked(copy).keys() - self._run(trainer, copy, "validation_step")
        except Exception as error:
            rank_zero_warn(f"CTDR: validation_step takes no training batch ({error}); training_step re-estimates.")
        else:
            if not missed:
                return copy
        self._evaluates = False
        return None

    def _run(self, trainer: Any, copy: LightningModule, step: str) -> set[str]:
        return reestimate(
            copy,
            lambda numbered: rehearsal.run_step(copy, trainer, step, numbered[1], numbered[0]),
            enumerate(rehearsal.training_batches(trainer, copy, self._n_batches)),
            partial(rehearsal.mean_over_ranks, trainer),
        )
