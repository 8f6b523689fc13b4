"""Tensor train of a linear layer: features split into modes, one small linear layer a core.

Paper: Novikov et al., arXiv 1509.06569 (TT-matrix). Reproduced: the interleaved (in, out) modes and the cores.
Changed: modes are the most balanced split of the features, so that shapes alone tell them; two cores below 512
features, three from there on. Complexity: O(r N) for N weights; a forward costs sum over cores of r_{k-1} o_k i_k r_k
times the other modes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.solvers import Solver
from ctdr_lightning.decomposition.methods.base import FactorCost, Ranks
from ctdr_lightning.decomposition.methods.tt import TT
from ctdr_lightning.decomposition.shapes.geometry import Geometry

_THREE_CORES_FROM = 512


def split(size: int, n_modes: int) -> tuple[int, ...]:
    """The most balanced factors of a number, largest first.

    Example:
        >>> split(768, 2), split(512, 3), split(7, 2)
        ((32, 24), (8, 8, 8), (7, 1))
    """
    if n_modes == 1:
        return (size,)
    divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
    first = min(divisors, key=lambda divisor: abs(divisor - size ** (1 / n_modes)))
    return tuple(sorted((first, *split(size // first, n_modes - 1)), reverse=True))


class TTLinear(TT):
    """Ranks between neighbouring cores."""

    name = "tt_linear"
    matrix_method = "svd"
    chained = False

    def supports(self, geometry: Geometry) -> bool:
        """Linear layers."""
        return not geometry.kernel and not geometry.lookup

    def modes(self, n_in: int, n_out: int, ranks: Ranks | None = None) -> list[tuple[int, int]]:
        """Input and output mode of each core."""
        n_cores = len(ranks) + 1 if ranks else 3 if min(n_in, n_out) >= _THREE_CORES_FROM else 2
        return list(zip(split(n_in, n_cores), split(n_out, n_cores), strict=True))

    def sizes(self, geometry: Geometry, ranks: Ranks | None = None) -> tuple[int, ...]:
        """Entries of each pair of modes."""
        return tuple(n_in * n_out for n_in, n_out in self.modes(geometry.in_size, geometry.out_size, ranks))

    def tensor(self, weight: Tensor, ranks: Ranks | None = None) -> Tensor:
        """The tensor to decompose: one mode a core, (in, out) interleaved."""
        modes = self.modes(weight.shape[1], weight.shape[0], ranks)
        split_up = weight.T.reshape(*(n_in for n_in, _ in modes), *(n_out for _, n_out in modes))
        order = [side * len(modes) + core for core in range(len(modes)) for side in (0, 1)]
        return split_up.permute(order).reshape([n_in * n_out for n_in, n_out in modes])

    def factor_geometries(self, geometry: Geometry, ranks: Ranks) -> tuple[Geometry, ...]:
        """A linear layer (in mode, left rank) to (out mode, right rank) a core."""
        modes = self.modes(geometry.in_size, geometry.out_size, ranks)
        sides = zip((1, *ranks), modes, (*ranks, 1), strict=True)
        return tuple(Geometry(n_in * left, n_out * right) for left, (n_in, n_out), right in sides)

    def solve(self, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """Left-orthogonal cores."""
        cores = list(solver.tt(self.tensor(weight, ranks), ranks))
        modes = self.modes(weight.shape[1], weight.shape[0], ranks)
        split_up = (core.reshape(len(core), *mode, -1) for core, mode in zip(cores, modes, strict=True))
        return [core.permute(2, 3, 1, 0).flatten(2).flatten(0, 1)[None] for core in split_up]

    def ranks_of(self, geometry: Geometry, shapes: Sequence[torch.Size]) -> Ranks:
        """Outputs of every core but the last, by its output mode."""
        modes = self.modes(geometry.in_size, geometry.out_size, tuple(range(len(shapes) - 1)))
        return tuple(shape[0] // n_out for shape, (_, n_out) in zip(shapes[:-1], modes[:-1], strict=True))

    def compose(self, geometry: Geometry, ranks: Ranks, weights: Sequence[Tensor]) -> Tensor:
        """Contract the cores, then bring the modes back in order."""
        modes = self.modes(geometry.in_size, geometry.out_size, ranks)
        product = weights[0].new_ones(1, 1, 1)
        for weight, (n_in, n_out), left in zip(weights, modes, (1, *ranks), strict=True):
            core = weight.reshape(n_out, -1, n_in, left)
            product = torch.einsum("oil,prql->opiqr", product, core).flatten(2, 3).flatten(0, 1)
        return product[..., 0][None]

    def costs(self, geometry: Geometry, ranks: Ranks, axes: tuple[int, ...]) -> list[FactorCost]:
        """Each core runs once an entry of all other modes."""
        modes = self.modes(geometry.in_size, geometry.out_size, ranks)
        found, n_rest = [], math.prod(axes) * geometry.in_size
        for factor, (n_in, n_out) in zip(self.factor_geometries(geometry, ranks), modes, strict=True):
            n_rest //= n_in
            found.append(FactorCost(2 * n_rest * factor.n_weights, n_rest * factor.out_size, factor.n_weights))
            n_rest *= n_out
        return found

    def n_stored(self, geometry: Geometry, ranks: Ranks, axes: tuple[int, ...]) -> int:
        """Also a copy of the input, its first mode brought to the end."""
        return super().n_stored(geometry, ranks, axes) + math.prod(axes) * geometry.in_size
