"""Truncated SVD of a matrix (Eckart and Young 1936).

Complexity: O(m n min(m, n)) for the Gram matrix, O(min(m, n)^3) for its eigenvectors.
"""

from __future__ import annotations

from tensorly.cp_tensor import CPTensor
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import leading_basis, working


def svd(matrix: Tensor, rank: int) -> CPTensor:
    """Best rank-``rank`` approximation of ``matrix`` (m, n).

    Args:
        matrix: Shape (m, n), any float dtype and device.
        rank: At most min(m, n).

    Returns:
        Weights (rank,) the singular values, factors (m, rank) and (n, rank) orthonormal, in the dtype of ``matrix``.
    """
    m = working(matrix)
    if m.shape[0] > m.shape[1]:
        weights, (right, left) = svd(m.T, rank)
    else:
        left = leading_basis(m, rank)
        right = m.T @ left
        weights = right.norm(dim=0)
        right = right / weights.clamp_min(1e-300 if m.itemsize == 8 else 1e-30)
    return CPTensor((weights.to(matrix.dtype), [left.to(matrix.dtype), right.to(matrix.dtype)]))
