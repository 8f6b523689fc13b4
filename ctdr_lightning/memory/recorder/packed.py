"""Sequences packed by their lengths, which torch's C++ reads and writes below all operators: it is given true tensors.

Python sees fake lengths and batch sizes; functions of C++ see those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpOverload, no_dispatch_modes

aten = torch.ops.aten
PACK: OpOverload = aten._pack_padded_sequence.default
PAD = "_pad_packed_sequence"
_EMPTY: OpOverload = aten.empty.memory_format
_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def takes_lengths(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether the second argument of a function are lengths or batch sizes."""
    name = getattr(func, "__name__", "")
    if name in _LAYERS:  # of a sequence that is not packed it is the states
        return len(args) > 1 and isinstance(args[1], Tensor) and args[1].dtype is torch.int64
    return name in ("_pack_padded_sequence", PAD)


def packed(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """A packed tensor, and the true batch sizes, which the backward reads."""
    with no_dispatch_modes():
        _, sizes = PACK(torch.zeros(*input.shape[:2], 1), lengths, batch_first)
        total = int(lengths.sum())
    return input.new_empty((total, *input.shape[2:])), sizes


def makes_lengths(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator, while a packed sequence is padded, makes the tensor into which C++ writes the lengths."""
    return func is _EMPTY and kwargs.get("dtype") is torch.int64 and len(args[0]) == 1
