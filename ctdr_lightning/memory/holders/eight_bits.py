"""Tensors wait where they are, in 8 bits an element: block-wise dynamic quantization, by ``bitsandbytes``.

Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861.

Reproduced: each block of 256 elements is divided by its largest and rounded to the nearest of 256 values that lie
    densest near zero, the signed set or the one of numbers that are not negative; tensors of fewer than 4096 elements
    stay as they are.
Modelled: nothing; the library's own functions quantize.
Left out: the fused kernel that updates in 8 bits. The state passes through in full, a chunk of parameters at a time, so
    that any optimizer which updates its parameters one by one may be used.

Memory: a quarter of float32, 1/64 for the blocks, and 1 KiB a tensor. Time: reading and writing the state once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import ConfigError

BLOCK = 256
# Each tensor carries the table of values of its elements, because the set is chosen on the device.
N_VALUES = 256
# bitsandbytes' own limit (``min_8bit_size``): biases and norms are few bytes and mind rounding most.
LEAST_ELEMENTS = 4096


@cache
def _library() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ConfigError(
            f"Optimizer state in 8 bits needs bitsandbytes, which cannot be imported: {error}.",
            "pip install bitsandbytes, or write optimizer_state='disk'.",
        ) from error
    return functional


@cache
def _values(*, signed: bool, device: torch.device) -> Tensor:
    """The 256 values that an element may take, shape ``(256,)``."""
    return _library().create_dynamic_map(signed=signed).to(device)


def fits_in_eight_bits(tensor: Tensor) -> bool:
    """Whether a tensor is quantized, rather than kept unchanged."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel() >= LEAST_ELEMENTS


def eight_bit_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor while it waits."""
    if not fits_in_eight_bits(tensor):
        return tensor.nbytes
    return tensor.numel() + 4 * -(-tensor.numel() // BLOCK) + 4 * N_VALUES


class _Small:
    """One tensor in 8 bits, or unchanged if it is small."""

    def __init__(self, tensor: Tensor) -> None:
        self._kept: Tensor | None = tensor
        if fits_in_eight_bits(tensor):
            signed, positive = (_values(signed=signed, device=tensor.device) for signed in (True, False))
            values = torch.where(tensor.amin() < 0, signed, positive)  # no question to the device that it must answer
            self._kept, self._dtype = None, tensor.dtype
            self._codes, self._scales = _library().quantize_blockwise(tensor, code=values, blocksize=BLOCK)

    def tensors(self) -> list[Tensor]:
        return [self._codes, self._scales.absmax, self._scales.code] if self._kept is None else [self._kept]

    def full(self) -> Tensor:
        if self._kept is not None:
            return self._kept
        return _library().dequantize_blockwise(self._codes, self._scales).to(self._dtype)


class SmallParcel:
    """Tensors in 8 bits.

    Args:
        holder: Whose they are.
        tensors: Flat and contiguous.
    """

    def __init__(self, holder: EightBits, tensors: Sequence[Tensor]) -> None:
        self.n_bytes = sum(map(eight_bit_bytes, tensors))
        self._holder = holder
        self._small = [_Small(tensor) for tensor in tensors]
        self._landing: list[Tensor] = []
        holder.count(self.n_bytes)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that remain in memory in their place."""
        return [tensor for small in self._small for tensor in small.tensors()]

    def gone(self) -> None:
        """They are gone as soon as they are put."""

    def start(self) -> list[Tensor]:
        """Make them whole."""
        self._landing = self._landing or [small.full() for small in self._small]
        return self._landing

    def fetch(self) -> list[Tensor]:
        """The same."""
        found, self._landing = self.start(), []
        return found

    def __del__(self) -> None:
        self._holder.count(-self.n_bytes)


class EightBits:
    """Holds tensors on their own device in 8 bits an element.

    Attributes:
        held_bytes: Bytes that it holds now.
        peak_bytes: The most that it held so far.
        device_bytes: Always 0: the quantized tensors are counted elsewhere.

    Raises:
        ConfigError: If bitsandbytes cannot be imported.
    """

    device_bytes = 0

    def __init__(self) -> None:
        _library()
        self.held_bytes = self.peak_bytes = 0

    def put(self, tensors: Sequence[Tensor]) -> SmallParcel:
        """Quantize tensors."""
        return SmallParcel(self, tensors)

    def count(self, n_bytes: int) -> None:
        """So many bytes more are held."""
        self.held_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def close(self) -> None:
        """Nothing is under way."""
