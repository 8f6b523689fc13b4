"""The geometry of one layer: the layout of its weight, its cost, its construction.

A dense layer and every small layer of its factorized form are described by the same record, so parameters,
multiply-adds and stored activations are counted by one formula each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS: dict[tuple[int, bool], type[nn.Module]] = {
    (1, False): nn.Conv1d, (2, False): nn.Conv2d, (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d, (2, True): nn.ConvTranspose2d, (3, True): nn.ConvTranspose3d,
}  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """One linear, embedding or convolution layer.

    Args:
        in_size: Input features or channels (rows of the table for an embedding).
        out_size: Output features or channels.
        kernel: Taps per spatial axis; empty for linear and embedding layers.
        stride: Stride per axis.
        padding: Padding per axis, or ``"same"``/``"valid"``.
        dilation: Dilation per axis.
        output_padding: Output padding per axis (transposed only).
        groups: Channel groups.
        padding_mode: As in ``torch.nn.Conv2d``.
        transposed: Whether it is a transposed convolution.
        flipped: Whether a matrix weight is stored as (in, out), as embeddings and GPT-2's ``Conv1D`` do.
        padding_idx: Row of an embedding that takes no gradient.
        sparse: Whether an embedding makes sparse gradients.
        lookup: Whether it is an embedding.
    """

    in_size: int
    out_size: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "zeros"
    transposed: bool = False
    flipped: bool = False
    padding_idx: int | None = None
    sparse: bool = False
    lookup: bool = False

    @property
    def n_axes(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def n_taps(self) -> int:
        """Taps of the whole kernel."""
        return math.prod(self.kernel)

    @property
    def is_matrix(self) -> bool:
        """Whether the weight of a group is a plain matrix (linear, embedding, 1x1 convolution)."""
        return self.n_taps == 1

    @property
    def n_weights(self) -> int:
        """Entries of the weight, bias aside."""
        return self.out_size * self.in_size * self.n_taps // self.groups

    @property
    def group_shape(self) -> tuple[int, ...]:
        """Shape of one group's weight: (out, in, *kernel)."""
        return (self.out_size // self.groups, self.in_size // self.groups, *self.kernel)

    def canonical(self, weight: Tensor) -> Tensor:
        """View a stored weight as (groups, out, in, *kernel), whatever the layer."""
        if self.flipped:
            return weight.T[None]
        if self.transposed:
            return weight.reshape(self.groups, -1, self.out_size // self.groups, *self.kernel).transpose(1, 2)
        return weight.reshape(self.groups, *self.group_shape)

    def native(self, canonical: Tensor) -> Tensor:
        """Undo `canonical`: the weight as the layer stores it."""
        if self.flipped:
            return canonical[0].T
        if self.transposed:
            canonical = canonical.transpose(1, 2)
        return canonical.reshape(-1, *canonical.shape[2:])

    def output_axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial sizes of the output for an input with spatial sizes ``axes``."""
        if not self.kernel:
            return axes
        return tuple(self._output_axis(size, axis) for axis, size in enumerate(axes))

    def _output_axis(self, size: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1)
        if self.padding == "same":
            return size
        pad = 0 if isinstance(self.padding, str) else self.padding[axis]
        if self.transposed:
            return (size - 1) * self.stride[axis] - 2 * pad + reach + self.output_padding[axis] + 1
        return (size + 2 * pad - reach - 1) // self.stride[axis] + 1

    def flops(self, axes: tuple[int, ...]) -> int:
        """Floating-point operations (two per multiply-add) of one sample's forward; ``axes`` are its input sizes."""
        if self.lookup:
            return 0
        positions = math.prod(axes if self.transposed else self.output_axes(axes))
        return 2 * positions * self.n_weights

    def pointwise(self, in_size: int, out_size: int) -> Geometry:
        """A layer of the same family that only mixes channels: 1x1, stride one, same groups."""
        ones, zeros = (1,) * self.n_axes, (0,) * self.n_axes
        return Geometry(in_size, out_size, ones, ones, zeros, ones, zeros, self.groups)

    def only_axes(self, in_size: int, out_size: int, axes: range, groups: int | None = None) -> Geometry:
        """The part of this layer that acts on some spatial axes; the other axes are left alone."""

        def keep(values: tuple[int, ...], neutral: int) -> tuple[int, ...]:
            return tuple(v if axis in axes else neutral for axis, v in enumerate(values))

        padding = self.padding if isinstance(self.padding, str) else keep(self.padding, 0)
        return replace(
            self,
            in_size=in_size,
            out_size=out_size,
            kernel=keep(self.kernel, 1),
            stride=keep(self.stride, 1),
            padding=padding,
            dilation=keep(self.dilation, 1),
            output_padding=keep(self.output_padding, 0),
            groups=self.groups if groups is None else groups,
        )

    def build(self, bias: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Make the plain layer, its weights not initialised and no random number drawn."""
        place = {"device": device, "dtype": dtype}
        if self.lookup:
            options: dict[str, Any] = {"padding_idx": self.padding_idx, "sparse": self.sparse}
            return nn.utils.skip_init(nn.Embedding, self.in_size, self.out_size, **options, **place)
        if not self.kernel:
            return nn.utils.skip_init(nn.Linear, self.in_size, self.out_size, bias=bias, **place)
        options = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        if self.transposed:
            options["output_padding"] = self.output_padding
        kind = CONVOLUTIONS[self.n_axes, self.transposed]
        arguments = (self.in_size, self.out_size, self.kernel)
        return nn.utils.skip_init(kind, *arguments, bias=bias, padding_mode=self.padding_mode, **options, **place)
