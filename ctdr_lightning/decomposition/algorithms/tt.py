"""Tensor train by successive SVDs (Oseledets 2011, SIAM J. Sci. Comput. 33(5)).

Left to right, each cut by the Gram matrix of the smaller side. All cores but the last are left-orthogonal: the gauge
is fixed.

Complexity: O(N r_max n) for N entries, plus an eigenproblem of at most r n a cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorly.tt_tensor import TTTensor
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import leading_basis, working


def tensor_train(tensor: Tensor, ranks: Sequence[int]) -> TTTensor:
    """Tensor train of a tensor (n_1, ..., n_d) with d - 1 inner ranks.

    Args:
        tensor: Any float dtype and device.
        ranks: Inner ranks; each at most the size of either side of its cut, given its neighbours.

    Returns:
        Cores (r_{k-1}, n_k, r_k) with r_0 = r_d = 1, in the dtype of ``tensor``.
    """
    rest = working(tensor)
    cores, left = [], 1
    for size, rank in zip(tensor.shape[:-1], ranks, strict=True):
        rest = rest.reshape(left * size, -1)
        basis = leading_basis(rest, rank)
        cores.append(basis.reshape(left, size, rank))
        rest, left = basis.T @ rest, rank
    cores.append(rest.reshape(left, tensor.shape[-1], 1))
    return TTTensor([core.to(tensor.dtype) for core in cores])
