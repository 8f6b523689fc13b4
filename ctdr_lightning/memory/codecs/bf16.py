"""Half the bits of a float32, lossy: bfloat16 keeps the range and 8 bits of precision."""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded


class BFloat16:
    """Rounded to bfloat16."""

    exact = False
    needs = "float"
    payload_bits = 16.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Round; a dtype of the same size or less stays unchanged."""
        return Encoded(flat, plain=True) if flat.itemsize <= 2 else Encoded(flat.to(torch.bfloat16))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Widen."""
        return encoded.payload.to(like.dtype)


CODECS.register("bf16")(BFloat16())
