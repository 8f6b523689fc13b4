"""The tensors of an optimizer's state, wherever it keeps them.

GaLore's are in objects of its own, LBFGS's in lists, those of 8-bit optimizers are the parts of a tensor subclass, and
an optimizer that wraps another one leaves all of it to that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ctdr_lightning.memory.values.tensors import own_part


def state_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """The tensors that optimizers keep between their steps; a quantised one is given as its parts.

    Args:
        optimizers: They are not changed.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9)
        >>> optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        >>> optimizer.step()
        >>> list(state_tensors([optimizer]))
        [tensor([1., 1.])]
    """
    yield from _within([[_kept_by(optimizer) for optimizer in optimizers]])


def _kept_by(optimizer: Optimizer) -> list[Any]:
    wrapped = [_kept_by(value) for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [list(optimizer.state.values()), wrapped]


def _within(left: list[Any]) -> Iterator[Tensor]:
    seen: dict[int, Any] = {}  # the objects too, as the next one might get the address of one that is gone
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            inner = parts_of(value)
            left.extend(inner)
            if not inner:
                yield value
        elif isinstance(value, list | tuple | set | dict):
            left.extend(reversed(list(value.values() if isinstance(value, dict) else value)))
        elif not isinstance(value, type | nn.Module | Optimizer):
            left.extend(getattr(value, "__dict__", {}).values())


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the contents of a tensor subclass; a plain or sharded one has no such parts.

    Args:
        tensor: Any; of a sharded one, the own shard counts.
    """
    own = own_part(tensor)
    if isinstance(own, DTensor) or not hasattr(own, "__tensor_flatten__"):
        return []
    names, _ = own.__tensor_flatten__()
    return [getattr(own, name) for name in names]
