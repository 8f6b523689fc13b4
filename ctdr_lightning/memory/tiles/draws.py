"""Random numbers of modules in tiles: drawn once for all samples, and cut, so that no result depends on the tiles.

The first tile draws for the whole batch, operator after operator, as the whole module would. Every tile, in the forward
and in the backward, reads its part. Zeros and ones are kept as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpMode
from ctdr_lightning.memory.values.op_traits import RANDOM, pin_reason_of_call

aten = torch.ops.aten
_FILLS = (aten.uniform_.default, aten.normal_.default, aten.exponential_.default)
_LIKE = (aten.rand_like.default, aten.randn_like.default)
_OF_SIZES = (aten.rand.default, aten.randn.default)


def drawn_shape(func: Any, args: Sequence[Any]) -> tuple[int, ...] | None:
    """The shape of the numbers that a random call draws; None where these cannot be drawn by themselves.

    Args:
        func: The operator.
        args: Of the call.

    Example:
        >>> drawn_shape(aten.rand.default, ([2, 3],))
        (2, 3)
    """
    if func in _OF_SIZES:
        return tuple(args[0])
    known = func in (*_FILLS, *_LIKE, aten.bernoulli_.float, aten.native_dropout.default)
    return tuple(args[0].shape) if known else None


def axis_of_samples(whole: Sequence[int], part: Sequence[int], n_whole: int, n_part: int) -> int | None:
    """The axis along which numbers are drawn for each sample; None where all samples share them.

    Args:
        whole: Shape of the numbers for all samples.
        part: For a part of them.
        n_whole: Number of samples.
        n_part: Of the part.

    Raises:
        ValueError: If the shapes differ otherwise.

    Example:
        >>> axis_of_samples((8, 40, 3), (8, 20, 3), 10, 5)
        1
    """
    differ = [axis for axis, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if not differ:
        return None
    (axis,) = differ
    if whole[axis] * n_part != part[axis] * n_whole:
        raise ValueError("numbers are not drawn for each sample")
    return axis


class DrawnOnce(OpMode):
    """Gives the random operators of a tile their part of the numbers of all samples.

    Args:
        axes: Of the samples in the numbers of each random operator; None where all samples share them.
        drawn: The numbers of all samples, one tensor an operator; the first tile fills the list.
        n_samples: Number of samples.
        begin: First sample of the tile.
        n_rows: Number of samples of the tile.
    """

    def __init__(
        self, axes: Sequence[int | None], drawn: list[Tensor], n_samples: int, begin: int, n_rows: int
    ) -> None:
        super().__init__()
        self._axes, self._drawn = axes, drawn
        self._n_samples, self._begin, self._n_rows = n_samples, begin, n_rows
        self._n_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if pin_reason_of_call(func, args, kwargs) != RANDOM:
            return func(*args, **kwargs)
        return _given(func, args, self._numbers(func, args, kwargs))

    def _numbers(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        index = self._n_seen
        self._n_seen += 1
        shape = drawn_shape(func, args)
        if shape is None or index >= len(self._axes):
            raise RuntimeError(f"{func} draws random numbers in tiles, and did not in the batch that was tried first.")
        axis = self._axes[index]
        if index == len(self._drawn):
            whole = list(shape)
            if axis is not None:
                whole[axis] = shape[axis] * self._n_samples // self._n_rows
            self._drawn.append(_draw(func, args, kwargs, whole))
        numbers = self._drawn[index]
        if axis is None:
            return numbers
        a_sample = numbers.shape[axis] // self._n_samples
        return numbers.narrow(axis, self._begin * a_sample, self._n_rows * a_sample)


def _draw(func: Any, args: Any, kwargs: Any, shape: Sequence[int]) -> Any:
    """The numbers for all samples, in the order of those of a tile, so that they are those of the whole module."""
    if func in _OF_SIZES:
        return func(shape, *args[1:], **kwargs)
    tile = args[0]
    order = sorted(range(tile.dim()), key=tile.stride, reverse=True)
    # a processor's zeros and ones are those of any type; that CUDA's are, was not seen
    in_bytes = func is aten.bernoulli_.float and tile.device.type == "cpu"
    whole = torch.empty_permuted(shape, order, dtype=torch.bool if in_bytes else tile.dtype, device=tile.device)
    if func is aten.native_dropout.default:
        return func(whole, *args[1:], **kwargs)[1]
    numbers = func(whole, *args[1:], **kwargs)
    return numbers.bool() if func is aten.bernoulli_.float else numbers


def _given(func: Any, args: Any, numbers: Tensor) -> Any:
    """The call's result with such numbers."""
    if func is aten.native_dropout.default:
        input, p = args[:2]
        return (input * numbers).mul_(1 / (1 - p) if p < 1 else 0.0), numbers
    if func in _OF_SIZES or func in _LIKE:
        return numbers.clone()  # the module may write to it
    return args[0].copy_(numbers)
