"""Eight bits a float, lossy: float8 e4m3, scaled so that the largest element is the largest float8."""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Float8:
    """Rounded to float8 e4m3 after scaling."""

    exact = False
    needs = "float"
    payload_bits = 8.0
    side_bits = 0.0
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Scale and round; a tensor with values that are not finite stays unchanged."""
        largest = flat.abs().amax().float() if flat.numel() else flat.new_zeros((), dtype=torch.float32)
        if not 0 < float(largest) < float("inf"):
            return Encoded(flat, plain=True)
        scale = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = (flat.float() / scale).clamp_(-_LARGEST, _LARGEST)
        return Encoded(scaled.to(torch.float8_e4m3fn).view(torch.uint8), numbers=(scale.item(),))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Widen and scale back."""
        return (encoded.payload.view(torch.float8_e4m3fn).float() * encoded.numbers[0]).to(like.dtype)


CODECS.register("fp8")(Float8())
