"""Sharded tensors in a step: the engine sees the ops and values of this process' shards, as of any other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.memory.values.tensors import own_part, wants_grad_itself

# The result of a collective that nobody has waited for yet; its module is private. Its own dispatch waits.
_AWAITED = "AsyncCollectiveTensor"


@cache
def _has_shards(types: tuple[type, ...]) -> bool:
    return any(issubclass(kind, DTensor) or kind.__name__ == _AWAITED for kind in types)


def on_shards(types: Iterable[type]) -> bool:
    """Whether a call takes sharded tensors.

    A dispatch mode that answers ``NotImplemented`` to it is asked again for each op on the local tensors, collectives
    among them.

    Args:
        types: The subclasses among the types of a call's tensors, as a mode hears of them.
    """
    return _has_shards(tuple(types))


class ShardHandle:
    """A handle on the shard of a sharded tensor that autograd saved.

    Args:
        handle: The shard's.
        tensor: The sharded tensor.
    """

    __slots__ = ("__weakref__", "handle", "layout")

    def __init__(self, handle: Any, tensor: DTensor) -> None:
        self.handle = handle
        self.layout = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def whole(self, shard: Tensor) -> DTensor:
        """The sharded tensor with this shard."""
        mesh, placements, shape, stride = self.layout
        with torch.no_grad(), no_dispatch_modes():  # a view, which is no op of the step
            return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def by_shards(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks for saved tensors that give others the shards of sharded tensors.

    Args:
        pack: Called to save a tensor.
        unpack: Called to have it back.
    """

    def pack_shard(tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor) or wants_grad_itself(tensor):
            return pack(tensor)
        shard = own_part(tensor)
        return ShardHandle(pack(shard), tensor) if type(shard) is Tensor else pack(tensor)

    def unpack_shard(handle: Any) -> Tensor:
        return handle.whole(unpack(handle.handle)) if type(handle) is ShardHandle else unpack(handle)

    return pack_shard, unpack_shard
