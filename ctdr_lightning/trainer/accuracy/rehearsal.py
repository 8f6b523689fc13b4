"""A copy of the module whose steps leave no trace in logs, metrics, optimizers or weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.nests import map_leaves
from ctdr_lightning.trainer.accuracy.own_loaders import own_loader
from ctdr_lightning.trainer.fake_trainer import optimizers_of
from ctdr_lightning.trainer.modules import NEEDS_GRAPH, overrides

_SILENT = ("log", "log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "print")


class _StillOptimizer:
    """Takes the place of an optimizer and does nothing."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None, **_: Any) -> Any:
        """Run the closure, if any; change nothing."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Change nothing."""

    def toggle_model(self, sync_grad: bool = True) -> Any:
        """Change nothing."""
        return _nothing()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _StillScheduler:
    def step(self, *_: Any, **__: Any) -> None:
        """Change nothing."""


def rehearse(
    module: LightningModule, trainer: Any, copied: Callable[[LightningModule], LightningModule] = duplicate
) -> LightningModule:
    """Copy a module such that its steps can be called for their forward alone.

    Args:
        module: Attached to ``trainer``; not changed.
        trainer: The running trainer, which the copy's step may read.
        copied: Copies the module.
    """
    double: Any = copied(module)
    double.trainer = trainer
    for name in _SILENT:
        vars(double)[name] = _ignore
    vars(double)["optimizers"] = partial(_still_optimizers, double)
    schedulers = [_StillScheduler() for _ in trainer.lr_scheduler_configs]
    few = None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers
    vars(double)["lr_schedulers"] = lambda: few
    return double.train()


def _still_optimizers(double: LightningModule, use_pl_optimizer: bool = True) -> Any:
    trainer: Any = double.trainer
    stills = [_StillOptimizer(optimizer) for optimizer in trainer.optimizers or optimizers_of(double)]
    return stills[0] if len(stills) == 1 else stills


def _ignore(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def evaluating(trainer: Any) -> Iterator[None]:
    """Whoever asks the trainer hears that it validates, so that transfer hooks do not augment."""
    stage = trainer.state.stage
    trainer.validating = True
    try:
        yield
    finally:
        trainer.state.stage = stage


def run_step(module: LightningModule, trainer: Any, name: str, batch: Any, batch_idx: int) -> Any:
    """Call ``training_step`` or ``validation_step`` on a batch as the loop would, precision included."""
    step: Any = getattr(module, name)
    plugin = trainer.precision_plugin
    indices = (("batch_idx", batch_idx, 2), ("dataloader_idx", 0, 3))
    given = [value for key, value, least in indices if is_param_in_hook_signature(step, key, min_args=least)]
    with plugin.train_step_context() if name == "training_step" else plugin.val_step_context():
        try:
            return step(_as_drawn(batch), *given)
        except RuntimeError as error:
            if NEEDS_GRAPH not in str(error) or torch.is_grad_enabled():
                raise
        with torch.enable_grad():
            return step(_as_drawn(batch), *given)


def _as_drawn(batch: Any) -> Any:
    """A batch without the traces of a step that ran on it: entries taken out of a dict, gradients of its tensors."""

    def cleaned(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            leaf.grad = None
        return leaf

    return map_leaves(cleaned, batch)


def training_batches(trainer: Any, module: LightningModule, count: int) -> Iterator[Any]:
    """Draw batches from the training data, on the device and in the precision that a step would get.

    The place of the training's own loaders, samplers and random generators stays where it is.

    Args:
        trainer: Past ``fit_loop.setup_data``.
        module: Its batch transfer hooks are used.
        count: How many at most; no more than an epoch has.
    """
    loader = CombinedLoader(trainer.train_dataloader, "max_size_cycle")
    loader.flattened = [own_loader(each) for each in loader.flattened]
    hooks: Any = trainer.datamodule
    if hooks is None or not overrides(hooks, "on_before_batch_transfer"):
        hooks = module
    for batch, _, _ in islice(iter(loader), int(min(count, trainer.num_training_batches))):
        ready = hooks.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
        yield trainer.strategy.batch_to_device(ready, dataloader_idx=0)


def mean_over_ranks(trainer: Any, tensor: Tensor) -> Tensor:
    """Average a tensor over ranks."""
    return trainer.strategy.reduce(tensor.clone(), reduce_op="mean") if trainer.world_size > 1 else tensor
