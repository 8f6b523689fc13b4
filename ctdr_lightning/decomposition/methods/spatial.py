"""Spatial SVD: a k x k convolution as k x 1 to r channels, then 1 x k.

Paper: Jaderberg et al., arXiv 1405.3866 (scheme 2 of Idelbayev and Carreira-Perpinan, CVPR 2020). Reproduced: the SVD
of the (in, first axis) x (out, other axes) unfolding, each axis with its own stride, padding and dilation. In one
dimension there is no other axis and it is the plain SVD; in three the second layer acts on two axes. On a depthwise
layer it has rank one a channel. Complexity: O(m n min(m, n)) for the m x n unfolding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.solvers import Solver
from ctdr_lightning.decomposition.methods.base import MatrixMethod, Ranks
from ctdr_lightning.decomposition.shapes.geometry import Geometry


class Spatial(MatrixMethod):
    """(In, first axis) x (out, other axes) unfolding."""

    name = "spatial"

    def supports(self, geometry: Geometry) -> bool:
        """Convolutions with more than one tap."""
        return not geometry.is_matrix

    def matrix(self, weight: Tensor) -> Tensor:
        """Shape (in * first axis, out * other axes)."""
        return weight.movedim(0, 2).flatten(2).flatten(0, 1)

    def factor_geometries(self, geometry: Geometry, ranks: Ranks) -> tuple[Geometry, ...]:
        """First axis, then the others."""
        inner = ranks[0] * geometry.groups
        return (
            geometry.only_axes(geometry.in_size, inner, range(1)),
            geometry.only_axes(inner, geometry.out_size, range(1, geometry.n_axes)),
        )

    def solve(self, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """Square roots of the singular values on both sides."""
        left, right = self.halves(weight, ranks[0], solver)
        n_out, n_in, first, *others = weight.shape
        vertical = left.T.reshape(1, ranks[0], n_in, first, *(1 for _ in others))
        horizontal = right.reshape(n_out, *others, ranks[0]).movedim(-1, 1)
        return [vertical, horizontal.reshape(1, n_out, ranks[0], 1, *others)]

    def ranks_of(self, geometry: Geometry, shapes: Sequence[torch.Size]) -> Ranks:
        """The channels between the two layers."""
        return (shapes[-1][0] // geometry.groups if geometry.transposed else shapes[-1][1],)
