"""Whether a ReLU's output is positive, one bit an element: Gist's Binarize (Jain et al., ISCA 2018).

For outputs that the backward reads by their sign alone: ReLU's own backward lets a gradient pass where the output is
positive, and max-pooling's looks at indices. The gradients are exact, the contents are not: they come back as 0 and 1.
"""

from __future__ import annotations

from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded
from ctdr_lightning.memory.codecs.packing import pack_bits, unpack_bits


class Sign:
    """Positive or not."""

    exact = True
    needs = "sign_only"
    payload_bits = 1.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Pack where it is positive; where there is a NaN it stays as it is, as a NaN is no sign."""
        # A sum of non-negative numbers is NaN only where one of them is, or where they overflow: both stay plain.
        if bool(flat.sum().isnan()):
            return Encoded(flat, plain=True)
        return Encoded(pack_bits(flat > 0), numbers=(flat.numel(),))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Ones where it was positive, else zeros."""
        return unpack_bits(encoded.payload, int(encoded.numbers[0])).to(like.dtype)


CODECS.register("sign")(Sign())
