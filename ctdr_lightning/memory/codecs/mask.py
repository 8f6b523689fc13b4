"""Two-valued floats to bits: 1/32 of a float32's bytes, exact. Dropout's mask on a CPU is 0 or 1/(1-p).

The mask is random, so that it can never be recomputed: only a codec or offload spares its bytes.
"""

from __future__ import annotations

from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded
from ctdr_lightning.memory.codecs.packing import INTEGERS, pack_bits, unpack_bits


class Mask:
    """Zero, or one other value."""

    exact = True
    needs = "two_valued"
    payload_bits = 1.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Pack where it is not zero; what has a third value stays as it is."""
        if not flat.numel():
            return Encoded(flat, plain=True)
        bits, other = flat.view(INTEGERS[flat.itemsize]), flat.amax()
        flags = bits != 0
        # Compared as integers: a third value, a negative zero and a NaN are all found.
        two_valued = (bits == other.view(INTEGERS[flat.itemsize])).eq_(flags).all()
        if not bool(two_valued & other.isfinite()):
            return Encoded(flat, plain=True)
        return Encoded(pack_bits(flags), (other.view(1),), (flat.numel(),))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Unpack, and multiply by the other value."""
        flags = unpack_bits(encoded.payload, int(encoded.numbers[0]))
        return flags.to(like.dtype).mul_(encoded.side[0])  # a product of both would copy the flags as floats besides


CODECS.register("mask")(Mask())
