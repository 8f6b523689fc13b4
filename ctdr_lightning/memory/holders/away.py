"""A tensor that waits in another place, or here in fewer bytes: encoded on the way out, decoded on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs import Stack, decode, encode
from ctdr_lightning.memory.holders.base import Holder, Parcel
from ctdr_lightning.memory.values.live_bytes import tell_trackers


def can_wait(tensor: object) -> bool:
    """Whether a tensor's storage is its own elements and nothing else, so that those are all that must be moved."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    if tensor._is_zerotensor() or tensor.is_conj() or tensor.is_neg():  # no memory, or other contents than its storage
        return False
    return tensor.nbytes == tensor.untyped_storage().nbytes() > 0


class AwayTensor:
    """The contents of a tensor, elsewhere.

    Args:
        tensor: For which ``can_wait`` holds.
        codecs: Codecs that compress it, in this order; an empty tuple moves it unchanged.
        holder: Its destination; None leaves it here.

    Raises:
        OffloadError: If the holder has no room.
    """

    __slots__ = ("_dtype", "_parcel", "_shape", "_stack", "_stride")

    def __init__(self, tensor: Tensor, codecs: Sequence[str], holder: Holder | None) -> None:
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        flat = tensor.new_empty(0).set_(tensor.untyped_storage(), 0, (tensor.numel(),), (1,))
        self._stack: Stack | None = encode(flat, codecs, _row(tensor)) if codecs else None
        moved = [flat] if self._stack is None else self._stack.tensors()
        tell_trackers(moved)
        self._parcel: Parcel | None = None
        if holder is not None:
            self._parcel = holder.put(moved)
            self._stack = self._stack and self._stack.without_tensors()

    def gone(self) -> None:
        """Wait until the source tensor may be freed or written over."""
        if self._parcel is not None:
            self._parcel.gone()

    def start(self) -> None:
        """Start to bring it back."""
        if self._parcel is not None:
            tell_trackers(self._parcel.start())

    def fetch(self) -> Tensor:
        """Bring it back; with the shape, strides and dtype that it had."""
        came = None
        if self._parcel is not None:
            self.start()
            came = self._parcel.fetch()
        if self._stack is not None:
            flat = decode(self._stack, came)
            tell_trackers((flat,))
        else:
            assert came is not None, "neither a codec nor a holder has it"
            flat = came[0]
        return flat.as_strided(self._shape, self._stride, flat.storage_offset())


def _row(tensor: Tensor) -> int:
    """Number of neighbours in memory that belong together: a channel's plane, or a token's features."""
    if tensor.dim() < 4:
        return tensor.shape[-1] if tensor.dim() else 1
    return prod(tensor.shape[2:]) if tensor.is_contiguous() else tensor.shape[1]
