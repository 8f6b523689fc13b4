"""The sign of a ReLU's output, one bit per element: Gist's Binarize (Jain et al., ISCA 2018).

For outputs that the backward reads by their sign alone: ReLU's own backward lets a gradient pass where the output is
positive, and max-pooling's looks at indices. The gradients are exact, the contents are not: they come back as 0 and 1.
"""

from __future__ import annotations

from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded, answers_at_once
from ctdr_lightning.memory.codecs.packing import pack_bits, unpack_as


class Sign:
    """Positive or not."""

    exact = True
    needs = "sign_only"
    payload_bits = 1.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Pack the test for positive; on a processor a tensor with a NaN stays unchanged, because a NaN has no sign."""
        if not flat.numel():
            return Encoded(flat, plain=True)
        if not answers_at_once(flat):
            # ReLU's backward stops a gradient where the output is 0 or less: it passes where there is a NaN.
            return Encoded(pack_bits((flat <= 0).logical_not_()), numbers=(flat.numel(),))
        least = flat.amin()
        if bool(least.isnan()):
            return Encoded(flat, plain=True)
        # A comparison takes five times as long as a conversion, and a ReLU's output has nothing negative.
        flags = flat.bool() if bool(least >= 0) else flat > 0
        return Encoded(pack_bits(flags), numbers=(flat.numel(),))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Ones where it was positive, else zeros."""
        return unpack_as(encoded.payload, int(encoded.numbers[0]), 1.0, like)


CODECS.register("sign")(Sign())
