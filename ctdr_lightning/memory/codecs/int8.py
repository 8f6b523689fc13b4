"""Eight bits a float, lossy: 256 levels a group with stochastic rounding (ActNN, Chen et al., ICML 2021)."""

from __future__ import annotations

from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded
from ctdr_lightning.memory.codecs.groups import LEAST_GROUP, quantise, restore


class Int8:
    """256 levels a group."""

    exact = False
    needs = "float"
    payload_bits = 8.0
    side_bits = 64 / LEAST_GROUP
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Round to levels; a tensor with values that are not finite stays unchanged."""
        found = quantise(flat, row, 256) if flat.numel() else None
        if found is None:
            return Encoded(flat, plain=True)
        levels, least, step = found
        return Encoded(levels.view(-1), (least, step), (flat.numel(),))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Levels to floats."""
        return restore(encoded.payload, encoded.side[0], encoded.side[1], int(encoded.numbers[0]), like.dtype)


CODECS.register("int8")(Int8())
