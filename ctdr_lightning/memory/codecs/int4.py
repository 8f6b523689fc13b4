"""Four bits a float, lossy: 16 levels a group with stochastic rounding (ActNN, Chen et al., ICML 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded
from ctdr_lightning.memory.codecs.groups import LEAST_GROUP, quantise, restore


class Int4:
    """16 levels a group, two in a byte."""

    exact = False
    needs = "float"
    payload_bits = 4.0
    side_bits = 64 / LEAST_GROUP
    drops_zeros = False

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Round to levels; a tensor with values that are not finite stays unchanged."""
        found = quantise(flat, row, 16) if flat.numel() else None
        if found is None:
            return Encoded(flat, plain=True)
        levels, least, step = found
        pairs = levels.view(-1)
        if pairs.numel() % 2:
            pairs = torch.cat([pairs, pairs[-1:]])
        pairs = pairs.view(-1, 2)
        numbers = (flat.numel(), levels.numel())
        return Encoded(pairs[:, 0] | pairs[:, 1] << 4, (least, step), numbers)

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Levels to floats."""
        n, n_levels = (int(x) for x in encoded.numbers)
        levels = torch.stack([encoded.payload & 15, encoded.payload >> 4], 1).view(-1)[:n_levels]
        return restore(levels, encoded.side[0], encoded.side[1], n, like.dtype)


CODECS.register("int4")(Int4())
