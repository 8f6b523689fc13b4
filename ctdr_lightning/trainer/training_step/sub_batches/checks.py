"""Checks before a batch is split: obstacles, and whether its loss is a mean over its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError, first_line
from ctdr_lightning.trainer.modules import overrides
from ctdr_lightning.trainer.training_step.layers import loss_of
from ctdr_lightning.trainer.training_step.optimizer.gradient_readers import gradient_reader
from ctdr_lightning.trainer.training_step.optimizer.in_backward import loop_hindrance
from ctdr_lightning.trainer.training_step.retry.snapshot import GlobalRandom, Snapshot
from ctdr_lightning.trainer.training_step.retry.write_guard import CannotRepeatError, WriteGuard
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import BY_BATCH
from ctdr_lightning.trainer.training_step.sub_batches.fixed_draws import FixedDraws
from ctdr_lightning.trainer.training_step.sub_batches.parts import cut, n_samples, parts_of

# In two parts, of three and two samples: uneven, so that a loss to which sizes matter is noticed, and larger than a
# single sample, on which a norm over samples fails.
_SAMPLES = 5
# So many such groups are compared, over the whole batch: of a batch sorted by length the first samples may be alike.
_GROUPS = 4
# Of the loss. Sums over samples are off by half of it; rounding in single precision stays below a millionth, in
# half precision below a hundredth.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 2e-2
# Dropout, and BatchNorm where parts may be normalised by themselves: losses of parts differ with these.
_BY_CHANCE = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase, BY_BATCH)
Step = Callable[[Any], Any]


def sub_batch_hindrance(trainer: Any, module: LightningModule) -> str:
    """Why the batches of a run cannot be cut; empty where they can.

    Args:
        trainer: About to train, or in training.
        module: The model.
    """
    for name in ("backward", "optimizer_zero_grad"):
        if overrides(module, name):
            return f"{type(module).__name__}.{name} is the module's own"
    if overrides(trainer.precision_plugin, "pre_backward"):
        return f"{type(trainer.precision_plugin).__name__}.pre_backward changes the loss"
    reason = loop_hindrance(trainer, module)
    reader = "" if reason else gradient_reader(module, trainer.callbacks)
    return f"{reader} reads the last step's gradients" if reader else reason


def check_mean(module: LightningModule, step: Step, batch: Any, *, half: bool) -> str:
    """Compare the losses of some samples with the means of the losses of parts of them, and put everything back.

    Dropout and BatchNorm are in evaluation mode meanwhile, and each sample draws the same random numbers in each call.
    Where the loss is still another one each time, the whole module is in evaluation mode.

    Args:
        module: The model.
        step: From a batch to the result of ``training_step``.
        batch: Of two samples or more.
        half: Whether the step computes in half precision.

    Returns:
        Why it could not be told; empty where it is a mean.

    Raises:
        ConfigError: If it is no mean.
    """
    groups = [cut(batch, first, first + _SAMPLES) for first in _firsts(n_samples(batch))]
    snapshot = Snapshot({"module": module, "batch": batch}, set(), most_bytes=math.inf)
    tolerance = _TOLERANCE_HALF if half else _TOLERANCE
    try:
        with torch.no_grad(), WriteGuard(snapshot.copied, snapshot.drawn_from):
            reasons = (_compare(module, step, few, tolerance) for few in groups)
            return next((reason for reason in reasons if reason), "")
    except CannotRepeatError as error:
        return f"the step changes {error}"
    except ConfigError:
        raise
    except Exception as error:  # the user's step may raise anything without gradients, or on so few samples
        return first_line(error)
    finally:
        snapshot.put_back()
        torch.clear_autocast_cache()  # weights that were cast without a graph would serve the step itself


def _firsts(n: int) -> list[int]:
    """The first sample of each group, from the first to the last of a batch of so many."""
    last = max(n - _SAMPLES, 0)
    return sorted({round(index * last / (_GROUPS - 1)) for index in range(_GROUPS)})


def _compare(module: LightningModule, step: Step, few: Any, tolerance: float) -> str:
    by_chance: list[nn.Module] = [part for part in module.modules() if isinstance(part, _BY_CHANCE)]
    losses = _Losses(step, GlobalRandom([module.device.index or 0] if module.device.type == "cuda" else []))
    for silenced in (by_chance, list(module.modules())):
        with _evaluating(silenced):
            (whole, drawn), (again, _) = losses.of(few), losses.of(few)
            if not _near(whole, again, [whole], tolerance):
                continue
            first, second = parts_of(few, 2)
            before = n_samples(first.batch) / n_samples(second.batch)
            of_parts = losses.of(first.batch)[0], losses.of(second.batch, before, drawn)[0]
        mean = first.share * of_parts[0] + second.share * of_parts[1]
        if _near(whole, mean, of_parts, tolerance):
            return ""
        if losses.drew:  # perhaps another number of samples draws others
            return "it differs in parts, which may be for what it draws"
        raise _no_mean(n_samples(few), whole, mean)
    return "it differs from call to call, in evaluation mode too"


def _no_mean(n: int, whole: float, mean: float) -> ConfigError:
    return ConfigError(
        f"sub_batches would change the loss: that of {n} samples is {whole:.6g}, the mean over their sub-batches "
        f"{mean:.6g}. The loss is not a mean over samples.",
        "Let training_step return the mean over the samples of its batch, with no term between samples and no padding "
        "left out of the mean, or leave sub_batches out.",
    )


class _Losses:
    """Losses of samples that draw the same in each call.

    Args:
        step: From a batch to the result of ``training_step``.
        random: What is drawn from, by the host such as for whether to flip the images.

    Attributes:
        drew: Whether a step drew anything.
    """

    def __init__(self, step: Step, random: GlobalRandom) -> None:
        self._step, self._random, self.drew = step, random, False

    def of(
        self, batch: Any, before: float = 0.0, drawn: Sequence[torch.Size] = ()
    ) -> tuple[float, Sequence[torch.Size]]:
        """The loss of some samples, and the shapes that their step drew.

        Args:
            batch: The samples.
            before: Those before them, over their number.
            drawn: Shapes that the step of all samples drew.
        """
        self._random.put_back()
        with FixedDraws(before, drawn) as draws:
            loss = loss_of(self._step(batch))
        self.drew |= self._random.moved
        if loss is None:
            raise RuntimeError("training_step returned no loss")
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RuntimeError(f"the loss is {value}")
        return value, draws.shapes


def _near(first: float, second: float, beside: Iterable[float], tolerance: float) -> bool:
    scale = max([abs(first), abs(second), *map(abs, beside)])
    return abs(first - second) <= tolerance * scale


@contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    before = [part.training for part in modules]
    try:
        for part in modules:
            part.training = False
        yield
    finally:
        for part, training in zip(modules, before, strict=True):
            part.training = training


def computes_in_half(device_type: str, parameters: Iterable[Tensor]) -> bool:
    """Whether a step now runs under autocast, or on weights of fewer than 32 bits."""
    return torch.is_autocast_enabled(device_type) or any(p.is_floating_point() and p.itemsize < 4 for p in parameters)
