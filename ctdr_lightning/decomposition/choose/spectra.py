"""The stable rank of a layer's weight: how many directions it spreads its energy over."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_ROUNDS = 12  # squared singular values in the ratio 0.7 are told apart to 1 %
_COLUMNS = 4  # a flat spectrum, that of untrained weights, has no single largest direction
_RANDOM = 0.9  # of ten networks untrained layers reach 0.94 and more; the lowest layer of each trained one 0.82 or less
_LEAST_SIDE, _LEAST_LAYERS = 8, 3  # fewer numbers tell no trained network from an untrained one


@torch.no_grad()
def stable_rank(weight: Tensor) -> float:
    """Squared Frobenius norm over squared spectral norm: at most the rank, and little moved by small singular values.

    The spectral norm is that of a few rounds of subspace iteration from a fixed start, so equal weights give equal
    ranks.

    Args:
        weight: Canonical weight (groups, out, in, *kernel); the mean over groups is taken.

    Returns:
        The stable rank; 0 of a weight of zeros, NaN of one that is not finite.

    Source:
        Rudelson and Vershynin, Sampling from large matrices, J. ACM 54 (2007), arXiv:math/0503442.

    Example:
        >>> round(stable_rank(torch.eye(8)[None]), 3)
        8.0
    """
    matrices = weight.detach().flatten(2).float()
    if matrices.shape[1] < matrices.shape[2]:
        matrices = matrices.mT
    energies = matrices.square().sum((1, 2))
    if not energies.isfinite().all():
        return math.nan
    ranks = energies / _largest(matrices).clamp_min(torch.finfo(energies.dtype).tiny)
    return float(ranks.mean())


def look_untrained(weights: Iterable[Tensor]) -> bool:
    """Whether every weight has the spectrum of random numbers; the first one that has not ends the search.

    Args:
        weights: Canonical weights of a network's layers; small ones are passed over.

    Source:
        Independent entries: the largest singular value of an n x m matrix is near sqrt(n) + sqrt(m) (Geman, A limit
        theorem for the norm of random matrices, Annals of Probability 8, 1980).

    Example:
        >>> drawn = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0))
        >>> look_untrained([drawn] * 3), look_untrained([drawn, drawn, drawn + 0.5])
        (True, False)
    """
    n_random = 0
    for weight in weights:
        n, m = weight.shape[1], math.prod(weight.shape[2:])
        if min(n, m) < _LEAST_SIDE:
            continue
        if not stable_rank(weight) >= _RANDOM * n * m / (math.sqrt(n) + math.sqrt(m)) ** 2:
            return False
        n_random += 1
    return n_random >= _LEAST_LAYERS


def _largest(matrices: Tensor) -> Tensor:
    """The largest squared singular value of each matrix."""
    groups, _, inputs = matrices.shape
    drawn = torch.randn(inputs, min(_COLUMNS, inputs), generator=torch.Generator().manual_seed(0))
    basis = drawn.to(matrices.device).expand(groups, -1, -1)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(matrices.mT @ (matrices @ basis)).Q
    return torch.linalg.matrix_norm(matrices @ basis, 2).square()
