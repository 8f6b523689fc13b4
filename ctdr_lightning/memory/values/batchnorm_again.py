"""Run BatchNorm again for less: normalise with the statistics that its first run found.

Pleiss et al., "Memory-Efficient Implementation of DenseNets", arXiv 1707.06990; Rota Bulo et al., "In-Place Activated
BatchNorm", CVPR 2018, arXiv 1712.02616. In training most of BatchNorm's time goes into mean and variance, which
autograd saves anyway. Reproduced: the output is made again from the input and the saved statistics. Ours: to the bit,
by the same kernel in evaluation mode, where ``invstd * weight`` goes in as the weight and the variance is 1, so that
its arithmetic is the same. Left out: making the input from the output, which is not exact, and GPUs, where other
kernels normalise. One read and one write of the tensor instead of three reads and a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpOverload, no_dispatch_modes
from ctdr_lightning.memory.values.value import Node, Value

# The least of three: the first also warms up.
N_TIMINGS = 3
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_TRAINING = 5
_STATS_DTYPES = (torch.float32, torch.float64)
_Looks = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.dtype]
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def has_shortcut(func: OpOverload, args: Sequence[Any], outs: Sequence[Any]) -> bool:
    """Whether a call that has run can be run again for less, as long as its other outputs are held."""
    if func is not _BATCH_NORM or not args[_TRAINING] or not args[0].is_cpu:
        return False
    x, weight, bias = args[:3]
    stats = outs[1].dtype
    fit = all(t is None or (t.dtype is stats and t.is_contiguous()) for t in (weight, bias))
    layout = _layout_of(x)
    return fit and layout is not None and _same_bits(x.dtype, stats, weight is None, bias is None, x.dim(), layout)


def take_shortcut(node: Node, made: Sequence[Value | None], outs: Sequence[Tensor]) -> None:
    """Let a captured call that has a shortcut be run again by it; its other outputs are held for that."""
    statistics = [value for value in made[1:] if value is not None]
    for value, tensor in zip(statistics, outs[1:], strict=True):
        value.keep(tensor)  # no gradient flows through it, so that it is in no cycle
        value.node = None
    node.func, node.args, node.outs = normalise_again, (*node.args[:3], *statistics), node.outs[:1]


def normalise_again(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """BatchNorm's output from the statistics that it found in training mode.

    Args:
        x: The input, shape ``(batch, channels, ...)``.
        weight: Scale of each channel, or None.
        bias: Shift of each channel, or None.
        mean: Mean of each channel.
        invstd: One over each channel's standard deviation.

    Returns:
        The output, bit for bit.
    """
    scale = invstd if weight is None else invstd * weight
    return torch.native_batch_norm(x, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def _layout_of(x: Tensor) -> torch.memory_format | None:
    """The layout for which the kernel knows one scale and one shift a channel; None where it has another."""
    if x.is_contiguous():
        return torch.contiguous_format
    layout = _LAYOUTS.get(x.dim())
    return layout if layout is not None and x.is_contiguous(memory_format=layout) else None


@cache
def _same_bits(
    dtype: torch.dtype, stats: torch.dtype, plain: bool, unshifted: bool, n_dims: int, layout: torch.memory_format
) -> bool:
    """Whether this build of torch gives the same bits both ways: tried once for each kind of call."""
    if stats not in _STATS_DTYPES:
        return False
    with torch.no_grad(), no_dispatch_modes():
        random = torch.Generator().manual_seed(0)
        shape = (3, 21, *(5, 7, 3)[: n_dims - 2])
        x = torch.randn(shape, generator=random).to(dtype).contiguous(memory_format=layout)
        weight, bias = (
            None if missing else torch.randn(shape[1], generator=random).to(stats) for missing in (plain, unshifted)
        )
        out, mean, invstd = _BATCH_NORM(x, weight, bias, None, None, True, 0.0, 1e-5)
        if mean.dtype is not stats:
            return False
        again = normalise_again(x, weight, bias, mean, invstd)
        # Inside the block: under a fake-tensor mode the comparison of two real tensors would raise.
        return torch.equal(out, again) and out.stride() == again.stride()


class ShortcutTimes:
    """Measures the times of shortcuts, as shares of the whole ops, on dummies once the step is over."""

    def __init__(self) -> None:
        self._calls: dict[int, _Looks] = {}

    def note(self, index: int, func: OpOverload, args: Sequence[Any], out: Any) -> str:
        """Remember the shapes of the call behind op ``index`` of the trace, if it has a shortcut.

        Returns:
            The reason why its outputs but the first are then pinned; the empty string if it has no shortcut.
        """
        if func is not _BATCH_NORM or not has_shortcut(func, args, out):
            return ""
        self._calls[index] = (tuple(args[0].shape), args[0].stride(), args[0].dtype, out[1].dtype)
        return "read when its op runs again"

    def shares(self) -> dict[int, float]:
        """By op index the share of the op's time that running it again takes; empty where memory does not suffice."""
        try:
            with torch.no_grad(), no_dispatch_modes():
                found = {looks: _share(*looks) for looks in dict.fromkeys(self._calls.values())}
        except (RuntimeError, MemoryError):
            return {}
        return {index: found[looks] for index, looks in self._calls.items()}


def _share(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, stats: torch.dtype) -> float:
    x = torch.empty_strided(shape, stride, dtype=dtype).fill_(1)
    one = torch.ones(shape[1], dtype=stats)
    whole, short = [], []
    for _ in range(N_TIMINGS):
        start_s = perf_counter()
        _BATCH_NORM(x, one, one, None, None, True, 0.0, 1e-5)
        middle_s = perf_counter()
        normalise_again(x, one, one, one, one)
        whole.append(middle_s - start_s)
        short.append(perf_counter() - middle_s)
    return min(1.0, min(short) / min(whole))
