"""Booleans to bits: an eighth of the bytes, exact. Dropout's masks on a GPU, attention masks, comparisons."""

from __future__ import annotations

from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded
from ctdr_lightning.memory.codecs.packing import pack_bits, unpack_bits


class Bits:
    """Eight booleans in a byte."""

    exact = True
    needs = "bool"
    payload_bits = 1.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Pack."""
        return Encoded(pack_bits(flat), numbers=(flat.numel(),))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Unpack."""
        return unpack_bits(encoded.payload, int(encoded.numbers[0]))


CODECS.register("bits")(Bits())
