"""Checks before a batch is split: obstacles, and whether its loss is a mean over its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError, first_line
from ctdr_lightning.basics.nests import map_leaves
from ctdr_lightning.basics.torch_private import has_gradient_hooks
from ctdr_lightning.trainer.modules import NEEDS_GRAPH, overrides
from ctdr_lightning.trainer.training_step.layers import loss_of
from ctdr_lightning.trainer.training_step.optimizer.gradient_readers import gradient_reader
from ctdr_lightning.trainer.training_step.optimizer.in_backward import loop_hindrance
from ctdr_lightning.trainer.training_step.retry.snapshot import Snapshot
from ctdr_lightning.trainer.training_step.retry.write_guard import CannotRepeatError, WriteGuard
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import BY_BATCH
from ctdr_lightning.trainer.training_step.sub_batches.fixed_draws import FixedDraws
from ctdr_lightning.trainer.training_step.sub_batches.own_changes import changed_since, first_difference, noted
from ctdr_lightning.trainer.training_step.sub_batches.parts import cut, n_samples, parts_of

# In two parts, of three and two samples: uneven, so that a loss to which sizes matter is noticed, and larger than a
# single sample, on which a norm over samples fails.
_SAMPLES = 5
# So many such groups are compared, over the whole batch: of a batch sorted by length the first samples may be alike.
_GROUPS = 4
# Of the loss. Sums over samples are off by half of it, the Dice loss of an untrained network by 1e-4. Rounding stays
# below 2e-7 in single precision (eight networks of timm), below a hundredth in half precision.
_TOLERANCE, _TOLERANCE_HALF = 1e-5, 2e-2
# Dropout, and BatchNorm where parts may be normalised by themselves: losses of parts differ with these.
_BY_CHANCE = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase, BY_BATCH)
_CHANGES = "the step changes"
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
    reason = loop_hindrance(trainer, module) or _hooked(module)
    reader = "" if reason else gradient_reader(module, trainer.callbacks)
    return f"{reader} reads the last step's gradients" if reader else reason


def _hooked(module: nn.Module) -> str:
    """That a gradient has a hook, which would run on the gradient of each part: clipping there is not the batch's."""
    name = next((name for name, weight in module.named_parameters() if has_gradient_hooks(weight)), "")
    return f"a hook on the gradient of '{name}' would run once a part" if name else ""


@dataclass(frozen=True)
class Checked:
    """A step of which no check says that its batches must not be cut.

    Attributes:
        unknown: Why it could not be told; empty where the loss is a mean.
        changed: Names of parameters and buffers that the step changes, by each part as by the whole batch.
    """

    unknown: str = ""
    changed: tuple[str, ...] = ()


def check_mean(module: LightningModule, step: Step, batch: Any, *, half: bool) -> Checked:
    """Compare the losses of some samples with the means of the losses of parts of them, and put everything back.

    Dropout and BatchNorm are in evaluation mode meanwhile, and each sample draws the same random numbers in each call.
    Where the loss is still another one each time, the whole module is in evaluation mode.

    Args:
        module: The model.
        step: From a batch to the result of ``training_step``.
        batch: Of two samples or more.
        half: Whether the step computes in half precision.

    Raises:
        ConfigError: If it is no mean, or if the step changes the module by the samples of its batch.
    """
    found = _checked(module, step, batch, half)
    # Copies of a whole frozen network are made only where a step writes it, graphs where it asks for a gradient.
    large, graphs = found.unknown.startswith(_CHANGES), NEEDS_GRAPH in found.unknown
    return _checked(module, step, batch, half, large=large, graphs=graphs) if large or graphs else found


def _checked(
    module: LightningModule, step: Step, batch: Any, half: bool, *, large: bool = False, graphs: bool = False
) -> Checked:
    groups = [cut(batch, first, first + _SAMPLES) for first in _firsts(n_samples(batch))]
    snapshot = Snapshot({"module": module, "batch": batch}, set(), most_bytes=math.inf, large=large)
    tolerance = _TOLERANCE_HALF if half else _TOLERANCE
    try:
        with torch.set_grad_enabled(graphs), _in_single_precision(), WriteGuard(snapshot.copied, snapshot.drawn_from):
            changed = _own_changes(module, _Losses(module, step, snapshot), groups[0])
            reasons = (_compare(module, _Losses(module, step, snapshot), few, tolerance) for few in groups)
            return Checked(next((reason for reason in reasons if reason), ""), changed)
    except CannotRepeatError as error:
        return Checked(f"{_CHANGES} {error}")
    except ConfigError:
        raise
    except Exception as error:  # the user's step may raise anything without gradients, or on so few samples
        return Checked(first_line(error))
    finally:
        snapshot.put_back()
        torch.clear_autocast_cache()  # weights that were cast without a graph would serve the step itself


def _firsts(n: int) -> list[int]:
    """The first sample of each group, from the first to the last of a batch of so many."""
    last = max(n - _SAMPLES, 0)
    return sorted({round(index * last / (_GROUPS - 1)) for index in range(_GROUPS)})


def _own_changes(module: LightningModule, losses: _Losses, few: Any) -> tuple[str, ...]:
    """Parameters and buffers that a step changes, by parts of its samples as by all.

    Raises:
        ConfigError: If it changes one by its samples.
    """
    losses.silenced = _by_chance(module)
    whole = losses.of(few)
    if not whole.changed:
        return ()
    first, second = parts_of(few, 2)
    before = n_samples(first.batch) / n_samples(second.batch)
    parts = losses.of(first.batch), losses.of(second.batch, before, whole.shapes)
    name = next((n for n in (first_difference(whole.changed, part.changed) for part in parts) if n), "")
    if name:
        raise set_otherwise(name, "by the samples of its batch")
    return tuple(whole.changed)


def set_otherwise(name: str, how: str) -> ConfigError:
    """The error of a parameter or buffer that parts would leave with other numbers."""
    return ConfigError(
        f"sub_batches would change '{name}', which training_step sets {how}.",
        "Change it in on_train_batch_end, which runs once for a whole batch, or leave sub_batches out.",
    )


def _by_chance(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, _BY_CHANCE)]


def _compare(module: LightningModule, losses: _Losses, few: Any, tolerance: float) -> str:
    for losses.silenced in (_by_chance(module), list(module.modules())):
        whole, again = losses.of(few), losses.of(few)
        if not _near(whole.loss, again.loss, [whole.loss], tolerance):
            continue
        first, second = parts_of(few, 2)
        before = n_samples(first.batch) / n_samples(second.batch)
        of_parts = losses.of(first.batch).loss, losses.of(second.batch, before, whole.shapes).loss
        mean = first.share * of_parts[0] + second.share * of_parts[1]
        if _near(whole.loss, mean, of_parts, tolerance):
            return ""
        if losses.drew:  # perhaps another number of samples draws others
            return "it differs in parts, which may be for what it draws"
        raise _no_mean(n_samples(few), whole.loss, mean)
    return "it differs from call to call, in evaluation mode too"


def _no_mean(n: int, whole: float, mean: float) -> ConfigError:
    return ConfigError(
        f"sub_batches would change the loss: that of {n} samples is {whole:.6g}, the mean over their sub-batches "
        f"{mean:.6g}. The loss is not a mean over samples.",
        "Let training_step return the mean over the samples of its batch, with no term between samples and no padding "
        "left out of the mean, or leave sub_batches out.",
    )


@dataclass(frozen=True)
class _Call:
    """A call of a step: its loss, the shapes that it drew, and the parameters and buffers that it changed."""

    loss: float
    shapes: Sequence[torch.Size]
    changed: dict[str, Tensor]


class _Losses:
    """Losses of samples; each call draws the same, and finds the module as it was.

    Args:
        module: The model.
        step: From a batch to the result of ``training_step``.
        snapshot: The state before the step.

    Attributes:
        silenced: Modules that are in evaluation mode meanwhile.
        drew: Whether a step drew anything.
    """

    def __init__(self, module: LightningModule, step: Step, snapshot: Snapshot) -> None:
        self._module, self._step, self._snapshot = module, step, snapshot
        self.silenced: list[nn.Module] = []
        self.drew = False

    def of(self, batch: Any, before: float = 0.0, drawn: Sequence[torch.Size] = ()) -> _Call:
        """The call of a step on some samples.

        Args:
            batch: The samples.
            before: Those before them, over their number.
            drawn: Shapes that the step of all samples drew.
        """
        self._snapshot.put_back()
        versions = noted(self._module)
        with _evaluating(self.silenced), FixedDraws(before, drawn) as draws:
            loss = loss_of(self._step(map_leaves(lambda leaf: leaf, batch)))  # it may pop from a dict
        self.drew |= self._snapshot.has_drawn
        if loss is None:
            raise RuntimeError("training_step returned no loss")
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RuntimeError(f"the loss is {value}")
        return _Call(value, draws.shapes, changed_since(self._module, versions))


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


@contextmanager
def _in_single_precision() -> Iterator[None]:
    """Compute single precision as such: rounded to TF32, a kernel for other sizes may be off by 1e-4."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def computes_in_half(device_type: str, parameters: Iterable[Tensor]) -> bool:
    """Whether a step now runs under autocast, or on weights of fewer than 32 bits."""
    return torch.is_autocast_enabled(device_type) or any(p.is_floating_point() and p.itemsize < 4 for p in parameters)
