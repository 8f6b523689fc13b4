"""Memory that a step does not make: weights, buffers, optimizer state, the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ctdr_lightning.memory.holders.optimizer_state import state_away_of
from ctdr_lightning.memory.holders.optimizer_state_tensors import state_tensors
from ctdr_lightning.memory.values.tensors import own_part, storage_bytes
from ctdr_lightning.trainer.modules import overrides


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take on this device; of sharded ones, the own shard."""
    return storage_bytes(map(own_part, tensors))


def gradient_sizes(module: nn.Module) -> list[int]:
    """Bytes of each parameter's gradient on this device; of sharded ones, the own shard's."""
    return [own_part(param).nbytes for param in module.parameters() if param.requires_grad]


def begins_sum(trainer: Any) -> bool:
    """Whether the present batch is the first of an accumulation: Lightning frees all gradients before its backward.

    Args:
        trainer: In training, with automatic optimization.
    """
    begins: bool = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
    return begins and not _frees_by_itself(trainer)


def adds_up(trainer: Any) -> bool:
    """Whether backwards of a run may add to gradients that exist."""
    return trainer.accumulate_grad_batches > 1 or _frees_by_itself(trainer)


def _frees_by_itself(trainer: Any) -> bool:
    """Whether the module has its own way to free gradients, which may fill them with zeros."""
    return trainer.lightning_module is not None and overrides(trainer.lightning_module, "optimizer_zero_grad")


def kept_in(optimizer: torch.optim.Optimizer, *, other_than: str) -> str:
    """The type of another device where FSDP's own offload keeps an optimizer's shards; empty if there is none.

    Args:
        optimizer: It is not changed.
        other_than: Type of the device of the steps.
    """
    shards = (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor))
    types = (own_part(shard).device.type for shard in shards)
    return next((found for found in types if found != other_than), "")


def waiting_tensors(optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Tensors that represent state which waits on the device in fewer bytes; each step makes them anew."""
    for away in filter(None, map(state_away_of, optimizers)):
        yield from away.tensors


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of the optimizers' state on the device, including compressed state."""
    return local_bytes((*state_tensors(optimizers), *waiting_tensors(optimizers)))
