"""Rank by empirical variational Bayes matrix factorization.

Paper: Nakajima et al., JMLR 14 (2013), "Global analytic solution of fully-observed variational Bayesian matrix
factorization"; used for Tucker-2 ranks by Kim et al., arXiv 1511.06530. Reproduced: the analytic threshold with the
noise variance estimated. Changed: only singular values are computed, and the search runs over the logarithm of the
variance on a matrix of unit scale, so that the rank does not depend on the scale of the weights (the public code
stops at an absolute tolerance of 1e-5 and does). Complexity: one Gram eigenvalue problem of the smaller side, then
O(min(m, n)) a search step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import spectrum, working

_GRID = 256
_REFINEMENTS = 3


def evbmf_rank(matrix: Tensor) -> int:
    """Rank of a matrix (m, n) once its noise is taken away; 0 where there is nothing but noise.

    Args:
        matrix: Shape (m, n), any float dtype, device and scale.
    """
    rows, columns = sorted(matrix.shape)
    energy = spectrum(working(matrix)).cpu().double().square()
    if energy[0] <= 0:
        return 0
    energy = energy * (rows * columns / energy.sum())
    alpha = rows / columns
    tau = 2.5129 * math.sqrt(alpha)
    edge = (1 + tau) * (1 + alpha / tau)
    variance = _noise_variance(energy, columns, alpha, edge)
    return int((energy > columns * variance * edge).sum())


def _noise_variance(energy: Tensor, columns: int, alpha: float, edge: float) -> float:
    rows = len(energy)
    most = min(math.ceil(rows / (1 + alpha)) - 1, rows) - 1
    rest = energy[most + 1 :]
    low = max(float(energy[most + 1]) / (columns * edge), float(rest.mean()) / columns) if len(rest) else 0.0
    high = float(energy.sum()) / (rows * columns)
    low = max(low, high * 1e-12)
    for _ in range(_REFINEMENTS):
        grid = torch.logspace(math.log10(low), math.log10(max(high, low)), _GRID, dtype=torch.float64)
        best = int(free_energy(energy, grid, columns, alpha, edge).argmin())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _GRID - 1)])
    return float(grid[best])


def free_energy(energy: Tensor, variances: Tensor, columns: int, alpha: float, edge: float) -> Tensor:
    """Free energy, up to constants, of each assumed noise variance.

    Args:
        energy: Squared singular values, shape (n,).
        variances: Noise variances, shape (v,).
        columns: Columns of the matrix, which has no more rows than columns.
        alpha: Rows over columns.
        edge: Least scaled energy of a component that is kept.

    Returns:
        Shape (v,); the least is the likeliest variance.
    """
    x = energy[None] / (columns * variances[:, None])
    large = x > edge
    safe = torch.where(large, x, edge)
    tau = 0.5 * (safe - (1 + alpha) + ((safe - (1 + alpha)).square() - 4 * alpha).clamp_min(0).sqrt())
    signal = x - tau + ((tau + 1) / safe).log() + alpha * (tau / alpha + 1).log()
    noise = x - x.clamp_min(1e-300).log()
    return torch.where(large, signal, noise).sum(1)
