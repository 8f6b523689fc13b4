"""Zero-value compression: a bit an element and the elements that are not zero (Rhu et al., "cDMA", HPCA 2018).

Exact to the bit: negative zeros count as elements. The size of the result depends on the contents, and is foretold from
the zeros that a recorded step had; where it would not be smaller the tensor stays unchanged. In software it runs at
0.6-0.8 GB/s a core to encode and 0.9-1.2 to decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs.base import CODECS, Encoded
from ctdr_lightning.memory.codecs.packing import INTEGERS, pack_bits, unpack_bits

# The comparison takes a byte an element meanwhile.
_COUNTED_AT_ONCE = 2**22


def n_kept(flat: Tensor) -> Tensor:
    """Number of the elements that are not zero; shape ``()``, on the tensor's device.

    Args:
        flat: Shape ``(n,)``, contiguous.
    """
    return torch.stack([part.count_nonzero() for part in _bits(flat).split(_COUNTED_AT_ONCE)]).sum()


def _bits(flat: Tensor) -> Tensor:
    return flat.view(INTEGERS[flat.itemsize])


class ZeroValues:
    """The mask of the elements that are not zero, and these elements."""

    exact = True
    needs = "zeros"
    payload_bits = 0.0
    side_bits = 1.0
    drops_zeros = True

    def encode(self, flat: Tensor, row: int) -> Encoded:
        """Leave the zeros out; a tensor with few zeros stays unchanged."""
        kept = _bits(flat) != 0
        n_kept, n = int(kept.sum()), flat.numel()
        if n_kept * flat.itemsize + n // 8 >= flat.nbytes:
            return Encoded(flat, plain=True)
        return Encoded(flat.masked_select(kept), (pack_bits(kept),), (n,))

    def decode(self, encoded: Encoded, like: Tensor) -> Tensor:
        """Put the zeros back."""
        n = int(encoded.numbers[0])
        return like.new_zeros(n).masked_scatter_(unpack_bits(encoded.side[0], n), encoded.payload)


CODECS.register("zvc")(ZeroValues())
