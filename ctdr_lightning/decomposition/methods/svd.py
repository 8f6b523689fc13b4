"""SVD: a linear layer as two, a convolution as k x k to r channels and 1 x 1 out (scheme 1).

Paper: Denton et al., arXiv 1404.0736 (linear); scheme 1 of Idelbayev and Carreira-Perpinan, CVPR 2020 (k x k).
Reproduced: both forms, stride on the first layer. Embeddings become a narrow table and a linear layer.
Complexity: O(m n min(m, n)) for the m x n unfolding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.solvers import Solver
from ctdr_lightning.decomposition.methods.base import MatrixMethod, Ranks
from ctdr_lightning.decomposition.shapes.geometry import Geometry


class SVD(MatrixMethod):
    """Out x (in, kernel) unfolding."""

    name = "svd"

    def supports(self, geometry: Geometry) -> bool:
        """Every layer."""
        return True

    def matrix(self, weight: Tensor) -> Tensor:
        """Shape (out, in * taps)."""
        return weight.flatten(1)

    def factor_geometries(self, geometry: Geometry, ranks: Ranks) -> tuple[Geometry, ...]:
        """The layer itself with r outputs, then a pointwise one."""
        inner = ranks[0] * geometry.groups
        first = replace(geometry, out_size=inner, flipped=geometry.lookup)
        return first, geometry.pointwise(inner, geometry.out_size)

    def solve(self, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """Square roots of the singular values on both sides."""
        left, right = self.halves(weight, ranks[0], solver)
        ones = (1,) * (weight.ndim - 2)
        return [right.T.reshape(1, ranks[0], *weight.shape[1:]), left.reshape(1, *left.shape, *ones)]

    def ranks_of(self, geometry: Geometry, shapes: Sequence[torch.Size]) -> Ranks:
        """The inputs of the last layer."""
        return (shapes[-1][1],)
