"""The bytes of a batch with a candidate of ``rank="auto"``, by the account that the run itself keeps."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from ctdr_lightning.basics.nests import leaves_of
from ctdr_lightning.memory import Trace
from ctdr_lightning.memory.account.batch import BatchAccount, with_room
from ctdr_lightning.memory.holders.disk import STAGING_BYTES
from ctdr_lightning.memory.holders.optimizer_bytes import Waits, on_device_of, predict, predict_for, waiting
from ctdr_lightning.memory.traces.optimizer import OptimizerBytes
from ctdr_lightning.trainer.fake_trainer import optimizers_of
from ctdr_lightning.trainer.groups import IN_8_BITS
from ctdr_lightning.trainer.modules import SMALL_ELEMENTS
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.strategies import bucket_bytes
from ctdr_lightning.trainer.training_step.optimizer.resident import adds_up
from ctdr_lightning.trainer.training_step.retry.reachable import reachable
from ctdr_lightning.trainer.training_step.retry.snapshot import MODULE, few_attributes


def candidate_account(
    trainer: Any, options: CallbackOptions, optimizer: Optimizer | None, batch: Any, trace: Trace, candidate: nn.Module
) -> BatchAccount:
    """The account of a batch with a candidate.

    Args:
        trainer: About to train.
        options: The callback's.
        optimizer: Of the dense model; None where it cannot be made yet, which counts as Adam.
        batch: The first one.
        trace: The candidate's step.
        candidate: Perhaps on ``meta``.
    """
    trained = [p for p in candidate.parameters() if p.requires_grad]
    sizes = [p.nbytes for p in trained]
    on_cpu = trainer.strategy.root_device.type == "cpu"
    # steps of the choice append to lists on the candidate, a copy, and not on the module itself
    owner = candidate if trainer.lightning_module is None else trainer.lightning_module
    copied_bytes = _copied_bytes(candidate, owner, batch, on_cpu) if options.retry_on_oom else 0
    inside = options.optimizer_step is not None
    waits = _waits(options, on_cpu=on_cpu)
    taken = _taken(trainer, optimizer, candidate, waits, inside=inside)
    taken = taken or predict_for(optimizer, trained, inside=inside, waits=waits)
    kept_bytes = sum(sizes) if options.keep_gradients else 0
    beside = trace.with_static(bucket_bytes(trainer.strategy, candidate))
    account = BatchAccount(beside, taken, kept_bytes=kept_bytes, copied_bytes=copied_bytes)
    if inside:
        return account.stepping_inside(sizes, taken)
    return account.adding(sizes) if adds_up(trainer) else account


def _waits(options: CallbackOptions, *, on_cpu: bool) -> Waits:
    to = options.optimizer_state
    if to is None:
        return nullcontext
    return partial(waiting, in_8_bits=to == IN_8_BITS, device_bytes=2 * STAGING_BYTES if on_cpu else 0)


def _taken(
    trainer: Any, optimizer: Optimizer | None, candidate: nn.Module, waits: Waits, *, inside: bool
) -> OptimizerBytes | None:
    """Bytes of the optimizer that the candidate itself configures, where its parameters are in several groups.

    Which of them get low-rank state, say, the module alone knows. None where one group says it all, or none is made.
    """
    if optimizer is None or len(optimizer.param_groups) == 1 or not isinstance(candidate, LightningModule):
        return None
    candidate.trainer = trainer  # copies of a LightningModule leave their trainer behind
    made = next(iter(optimizers_of(candidate)), None)
    if made is None or len(made.param_groups) != len(optimizer.param_groups):
        return None
    for group, own in zip(made.param_groups, optimizer.param_groups, strict=True):
        group.update(on_device_of(own))
    with waits(made):
        return predict([made], inside=inside)


def _copied_bytes(candidate: nn.Module, owner: nn.Module, batch: Any, on_cpu: bool) -> int:
    """Bytes of the copies by which a step that ran out of memory is put back: of all small tensors but the weights.

    Attributes that are no buffers are those of ``owner``. On a processor the state of torch's generator is one more.

    A budget that is only just met without them is refused, or planned anew, once training makes them.
    """
    frozen = [p for p in candidate.parameters() if not p.requires_grad]
    batched = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
    small = [t for t in (*frozen, *candidate.buffers(), *batched) if t.numel() <= SMALL_ELEMENTS]
    small += few_attributes(reachable({MODULE: owner}).tensors)
    n_bytes = sum(t.nbytes for t in {id(t): t for t in small}.values())
    return with_room(n_bytes + (torch.get_rng_state().nbytes if on_cpu else 0))
