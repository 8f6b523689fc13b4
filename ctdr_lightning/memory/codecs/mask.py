"""Two-valued floats to bits: 1/32 of a float32's bytes, exact. Dropout's mask on a CPU is 0 or 1/(1-p).

The two operators that make it there cannot run again: only a codec or offload spares its bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded
from ctdr_lightning.memory.codecs.packing import INTEGERS, pack_bits, unpack_as

_PARTS = 4  # each part's comparison takes memory of its own: a quarter of the mask's


class Mask:
    """Zero, or one other value."""

    exact = True
    needs = "two_valued"
    payload_bits = 1.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Pack the test for zero; a tensor with a third value stays unchanged."""
        if not flat.numel():
            return Encoded(flat, plain=True)
        bits, other = flat.view(INTEGERS[flat.itemsize]), flat.amax()
        flags = bits.bool()
        if not bool(
            _differ(bits, other.view(bits.dtype)).bitwise_xor_(flags).view(torch.uint8).amin() & other.isfinite()
        ):
            return Encoded(flat, plain=True)
        # A number is no tensor: four held bytes for each mask were in no plan. A double holds any float to the bit.
        return Encoded(pack_bits(flags), numbers=(flat.numel(), other.item()))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Unpack to zero and the other value."""
        n, other = encoded.numbers
        return unpack_as(encoded.payload, int(n), other, like)


def _differ(bits: Tensor, other: Tensor) -> Tensor:
    """Elementwise inequality of integers: finds a third value, a negative zero and a NaN alike.

    ``bits != other`` is the same and takes five times as long: comparisons are not vectorised.
    """
    found = torch.empty_like(bits, dtype=torch.bool)
    for part, into in zip(bits.chunk(_PARTS), found.chunk(_PARTS), strict=True):
        into.copy_(part.bitwise_xor(other))
    return found


CODECS.register("mask")(Mask())
