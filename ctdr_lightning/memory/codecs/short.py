"""Indices to 16 bits: a quarter of an int64's bytes, exact. Max-pooling's indices are positions in one plane."""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded

_LARGEST = torch.iinfo(torch.int16).max


class Short:
    """Integers that 16 bits can hold."""

    exact = True
    needs = "index"
    payload_bits = 16.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Narrow; a tensor with values out of range stays unchanged."""
        if not flat.numel():
            return Encoded(flat, plain=True)
        low, high = flat.aminmax()
        if int(low) < -_LARGEST - 1 or int(high) > _LARGEST:
            return Encoded(flat, plain=True)
        return Encoded(flat.to(torch.int16))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Widen."""
        return encoded.payload.to(like.dtype)


CODECS.register("short")(Short())
