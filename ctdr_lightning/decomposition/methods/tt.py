"""Tensor train of a convolution: 1 x 1, one layer a spatial axis, 1 x 1, every neighbour pair with its own rank.

Paper: Oseledets 2011 (the train); Garipov et al., arXiv 1611.03214, put convolutions in TT form. Changed: the modes
are (in, axes ..., out), so that every core is a plain convolution, where the paper splits channels into small modes
and reshapes. Complexity: O(r N) for N weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import spectrum, working
from ctdr_lightning.decomposition.algorithms.solvers import Solver
from ctdr_lightning.decomposition.methods.base import Method, Ranks, RankTable, grid
from ctdr_lightning.decomposition.shapes.geometry import Geometry


class TT(Method):
    """Ranks between neighbours, input side first."""

    name = "tt"
    matrix_method = "tt_linear"

    def supports(self, geometry: Geometry) -> bool:
        """Convolutions with more than one tap."""
        return not geometry.is_matrix

    def tensor(self, weight: Tensor) -> Tensor:
        """The tensor to decompose: (in, axes ..., out)."""
        return weight.movedim(0, -1)

    def sizes(self, geometry: Geometry, ranks: Ranks | None = None) -> tuple[int, ...]:
        """Mode sizes of a group's tensor."""
        return (geometry.group_shape[1], *geometry.kernel, geometry.group_shape[0])

    def factor_geometries(self, geometry: Geometry, ranks: Ranks) -> tuple[Geometry, ...]:
        """Each axis with its own stride, padding and dilation."""
        first, *rest = (rank * geometry.groups for rank in ranks)
        middle, inner = [], first
        for axis, outer in enumerate(rest):
            middle.append(geometry.only_axes(inner, outer, range(axis, axis + 1)))
            inner = outer
        return geometry.pointwise(geometry.in_size, first), *middle, geometry.pointwise(inner, geometry.out_size)

    def unfoldings(self, weight: Tensor) -> list[Tensor]:
        """One a cut."""
        tensor = self.tensor(weight)
        return [tensor.flatten(0, cut).flatten(1) for cut in range(tensor.ndim - 1)]

    def feasible(self, geometry: Geometry, ranks: Ranks) -> Ranks:
        """No rank above its neighbour's times the mode between them."""
        sizes = self.sizes(geometry, ranks)
        found = list(super().feasible(geometry, ranks))
        for cut in range(len(found)):
            found[cut] = min(found[cut], (found[cut - 1] if cut else 1) * sizes[cut])
        for cut in reversed(range(len(found))):
            found[cut] = min(found[cut], (found[cut + 1] if cut + 1 < len(found) else 1) * sizes[cut + 1])
        return tuple(found)

    def solve(self, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """Left-orthogonal cores, all energy in the last layer."""
        cores = list(solver.tt(self.tensor(weight), ranks))
        n_axes = weight.ndim - 2
        shapes = [
            tuple(size if axis == own else 1 for axis in range(n_axes)) for own, size in enumerate(weight.shape[2:])
        ]
        middle = [
            core.permute(2, 0, 1).reshape(1, core.shape[2], core.shape[0], *s)
            for core, s in zip(cores[1:-1], shapes, strict=True)
        ]
        first, last, ones = cores[0][0].T, cores[-1][..., 0].T, (1,) * n_axes
        return [first.reshape(1, *first.shape, *ones), *middle, last.reshape(1, *last.shape, *ones)]

    def ranks_of(self, geometry: Geometry, shapes: Sequence[torch.Size]) -> Ranks:
        """Outputs of every layer but the last."""
        g = geometry.groups
        middle = [shape[1] if geometry.transposed else shape[0] // g for shape in shapes[1:-1]]
        return (shapes[0][0] // g, *middle)

    def table(self, geometry: Geometry, weight: Tensor) -> RankTable:
        """Sum of the tails of all cuts: an upper bound of the TT-SVD's error (Oseledets 2011, theorem 2.2)."""
        tails = []
        for parts in zip(*(self.unfoldings(part) for part in working(weight)), strict=True):
            energy = torch.stack([spectrum(matrix).square() for matrix in parts]).sum(0)
            tails.append((1 - energy.cumsum(0) / energy.sum().clamp_min(1e-300)).clamp_min(0).cpu())
        rows = [
            r for r in grid([len(tail) for tail in tails]).tolist() if self.feasible(geometry, tuple(r)) == tuple(r)
        ]
        ranks = torch.tensor(rows)
        error = torch.stack([tail[ranks[:, cut] - 1] for cut, tail in enumerate(tails)]).sum(0).sqrt()
        parameters = torch.tensor([self.n_parameters(geometry, tuple(row)) for row in rows])
        return RankTable(ranks, parameters, error)
