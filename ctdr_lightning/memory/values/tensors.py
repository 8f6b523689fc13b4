"""The engine's questions to a tensor: its version, its storage, a second object on the same contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ctdr_lightning.basics.torch_private import (
    DispatchKey,
    NoTorchDispatch,
    SetKeyExcluded,
    is_key_excluded,
    n_dispatch_modes,
    no_dispatch_modes,
    strided_parts,
)

_PLAIN = (Tensor, torch.nn.Parameter)
_ADINPLACE = DispatchKey.ADInplaceOrView


def version_of(tensor: Tensor) -> int:
    """The tensor's in-place version; -1 where none is tracked."""
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return -1


def wants_grad_itself(tensor: Tensor) -> bool:
    """Whether the tensor is a leaf that requires grad.

    Never read ``is_leaf`` or ``grad_fn`` of a view. After a write in place, reading it makes autograd regenerate the
    view's ``grad_fn`` with a later sequence number; the backward then runs it earlier and sums gradients in another
    order, so that the last bits differ.
    """
    return tensor.requires_grad and not tensor._is_view() and tensor.is_leaf


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None where its layout (sparse, say) has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor's layout is one with a storage."""
    return tensor.layout is torch.strided


def own_part(tensor: Tensor) -> Tensor:
    """The shard of this process, of a sharded tensor, outside of autograd's graph; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad(), no_dispatch_modes():  # else it would be an op of the step: a parameter's shard is a view
        return tensor.to_local()


def tensors_in(args: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an aten call."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif type(arg) in (list, tuple):
            yield from (a for a in arg if isinstance(a, Tensor))


def alias_of(tensor: Tensor) -> Tensor:
    """A detached tensor object on the same storage and version counter, so that writes in place are noticed."""
    if type(tensor) in _PLAIN:
        if not n_dispatch_modes():  # as below a mode's function
            return _detached(tensor)
        with NoTorchDispatch():
            return _detached(tensor)
    with no_dispatch_modes():  # subclasses (fake tensors, DTensor) bring their own dispatch
        return tensor.detach()


def _detached(tensor: Tensor) -> Tensor:
    if not is_key_excluded(_ADINPLACE):  # in autograd
        return tensor.detach()
    with SetKeyExcluded(_ADINPLACE, False):  # so that the version is shared
        return tensor.detach()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; of sparse ones, those of indices and values."""
    parts = ((t,) if type(t) in _PLAIN and t.layout is torch.strided else strided_parts(t) for t in tensors)
    storages = (part.untyped_storage() for some in parts for part in some)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_channels_last(tensor: Tensor) -> bool:
    """Whether an image or a volume lies in memory with its channels last, and not also with its width last.

    Args:
        tensor: Any tensor.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
