"""What stands in memory besides what a step makes: weights, buffers, optimizer state, the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ctdr_lightning.memory.holders.optimizer_state import state_away_of
from ctdr_lightning.memory.values.tensors import storage_bytes
from ctdr_lightning.trainer.training_step.device import tensors_of


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take on this device; of sharded ones, the own shard."""
    return storage_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors)


def optimizer_tensors(optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """The state that optimizers keep."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def waiting_tensors(optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """What stands for state that waits on the device in fewer bytes; each step makes it anew."""
    for away in filter(None, map(state_away_of, optimizers)):
        yield from away.tensors


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of the optimizers' state on the device, what waits there in fewer bytes included."""
    return local_bytes((*optimizer_tensors(optimizers), *waiting_tensors(optimizers)))


def resident_tensors(module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batch: Any) -> Iterator[Tensor]:
    """Weights, buffers, optimizer state and batch: what a step finds in memory besides gradients."""
    yield from module.parameters()
    yield from module.buffers()
    yield from optimizer_tensors(optimizers)
    yield from tensors_of(batch)
