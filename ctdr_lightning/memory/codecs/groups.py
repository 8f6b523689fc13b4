"""Floats as small integers by groups with stochastic rounding, after ActNN (Chen et al., ICML 2021).

Every group of neighbouring elements, one channel's plane or one token's features, has its own least value and step.
An element is rounded up with a probability equal to the fraction that rounding down would lose, so that its
expectation is exact. The
random numbers come from a generator of our own: the program's random state is not touched.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Short groups cost more in their two float32 numbers than they gain; long ones have outliers. ActNN takes 256.
LEAST_GROUP, MOST_GROUP = 64, 1024
_SEED = 0x9E3779B9


def group_length(row: int) -> int:
    """Number of elements that share a least value and a step: a row, cut or joined to a sensible length."""
    while row > MOST_GROUP:
        row = -(-row // 2)
    return row if row >= LEAST_GROUP else row * -(-LEAST_GROUP // max(row, 1))


@cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(_SEED)


def quantise(flat: Tensor, row: int, n_levels: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Integers in ``[0, n_levels)`` with each group's least value and step.

    Args:
        flat: Shape ``(n,)``, a float dtype.
        row: How many neighbouring elements belong together.
        n_levels: How many integers there are.

    Returns:
        ``(levels, least, step)`` of shapes ``(n_groups, length)`` uint8, ``(n_groups, 1)`` and ``(n_groups, 1)``
        float32; None where something is not finite.
    """
    length = group_length(row)
    values = flat.float()
    if values.numel() % length:
        values = torch.cat([values, values[-1:].expand(-values.numel() % length)])
    values = values.view(-1, length)
    least, most = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    step = (most - least) / (n_levels - 1)
    if not bool(step.isfinite().all()):
        return None
    scaled = (values - least) / step.clamp_min(torch.finfo(torch.float32).tiny)
    dither = torch.rand(scaled.shape, generator=_generator(flat.device), device=flat.device)
    return scaled.add_(dither).floor_().clamp_(0, n_levels - 1).to(torch.uint8), least, step


def restore(levels: Tensor, least: Tensor, step: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Floats from integers: shape ``(n,)``."""
    return torch.addcmul(least, levels.view(least.shape[0], -1).float(), step).view(-1)[:n].to(dtype)
