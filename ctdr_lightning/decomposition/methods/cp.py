"""CP: a k x k convolution as 1 x 1, depthwise, 1 x 1 (``cp``), or with one depthwise layer a spatial axis (``cp4``).

Paper: Lebedev et al., arXiv 1412.6553 (four factors: in, height, width, out). Reproduced: the layer map, as ``cp4``.
Changed: ``cp`` has three factors (lower error at a fifth of the solver's time at equal rank); HOSVD start; factors
conditioned for fine-tuning, see `algorithms.cp`. A CP of rank R is a Tucker-2 of ranks (R, R) with a diagonal core,
so at equal intermediate activations it never has less error than Tucker: ``auto`` leaves it out and it must be asked
for by name. Complexity: O(O I K R) a sweep.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.cp import cp, degeneracy
from ctdr_lightning.decomposition.algorithms.rebuild import rebuild
from ctdr_lightning.decomposition.algorithms.solvers import Solver
from ctdr_lightning.decomposition.methods.base import Candidate, KeepDenseError, Method, Ranks, RankTable
from ctdr_lightning.decomposition.shapes.geometry import Geometry

_ALARM = 5.0
_LADDER = 8
_SHORT_SWEEPS = 6


class DegenerateFactorsWarning(UserWarning):
    """Components of a CP that cancel each other: such a layer hardly trains."""


class CP(Method):
    """One rank: the number of components. Factors (in, taps, out)."""

    name = "cp"

    def supports(self, geometry: Geometry) -> bool:
        """Convolutions with more than one tap."""
        return not geometry.is_matrix

    def spatial_axes(self, n_axes: int) -> list[range]:
        """The axes of each depthwise layer: one with all of them."""
        return [range(n_axes)]

    def tensor(self, weight: Tensor) -> Tensor:
        """The tensor to decompose (in, taps ..., out), one mode a depthwise layer."""
        kernel = weight.shape[2:]
        taps = [math.prod(kernel[axis] for axis in axes) for axes in self.spatial_axes(len(kernel))]
        return weight.reshape(*weight.shape[:2], *taps).movedim(0, -1)

    def factor_geometries(self, geometry: Geometry, ranks: Ranks) -> tuple[Geometry, ...]:
        """1 x 1, depthwise layers that carry stride, padding and dilation, 1 x 1."""
        inner = ranks[0] * geometry.groups
        middle = (geometry.only_axes(inner, inner, axes, inner) for axes in self.spatial_axes(geometry.n_axes))
        return geometry.pointwise(geometry.in_size, inner), *middle, geometry.pointwise(inner, geometry.out_size)

    def unfoldings(self, weight: Tensor) -> list[Tensor]:
        """Input-channel and output-channel unfoldings: the rank is at least that of either."""
        return [weight.movedim(1, 0).flatten(1), weight.flatten(1)]

    def vbmf(self, weight: Tensor) -> Ranks:
        """The higher of the two."""
        return (max(super().vbmf(weight)),)

    def max_ranks(self, geometry: Geometry) -> Ranks:
        """One component an entry of all modes but the largest: always exact."""
        shape = self.tensor(torch.empty(geometry.group_shape, device="meta")).shape
        return (math.prod(shape) // max(shape),)

    def solve(self, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """Norm-balanced factors; warns where components cancel."""
        tensor = self.tensor(weight)
        _, factors = solver.cp(tensor, ranks[0])
        alarm = degeneracy(factors, tensor)
        if alarm > _ALARM:
            warnings.warn(
                f"CP of rank {ranks[0]}: components of {alarm:.1f} times the weight's norm cancel; use tucker.",
                DegenerateFactorsWarning,
                stacklevel=2,
            )
        ones, kernel = (1,) * (weight.ndim - 2), weight.shape[2:]
        middle = [
            factor.T.reshape(ranks[0], 1, 1, *(size if axis in axes else 1 for axis, size in enumerate(kernel)))
            for factor, axes in zip(factors[1:-1], self.spatial_axes(len(kernel)), strict=True)
        ]
        first, last = factors[0].T, factors[-1]
        return [first.reshape(1, *first.shape, *ones), *middle, last.reshape(1, *last.shape, *ones)]

    def ranks_of(self, geometry: Geometry, shapes: Sequence[torch.Size]) -> Ranks:
        """Outputs of the first layer."""
        return (shapes[0][0] // geometry.groups,)

    def within(self, geometry: Geometry, weight: Tensor, budget: int, multiple: int) -> Candidate:
        """The largest rank that fits."""
        rank = min(budget // self.n_parameters(geometry, (1,)), *self.max_ranks(geometry)) // multiple * multiple
        if rank < 1:
            raise KeepDenseError(f"no {self.name} rank fits {budget:,} parameters")
        return self.at(geometry, (rank,))

    def reaching(self, geometry: Geometry, weight: Tensor, bound: float, multiple: int) -> Candidate:
        """Bisection on the rank, each tried by a short fit."""
        low, high = 0, max(self._most(geometry) // multiple, 1)
        if self.error(weight, high * multiple) > bound:
            raise KeepDenseError(f"no {self.name} rank below the dense cost reaches a relative error of {bound:.3g}")
        while high - low > 1 + high // 32:
            middle = (low + high) // 2
            low, high = (low, middle) if self.error(weight, middle * multiple) <= bound else (middle, high)
        return self.at(geometry, (high * multiple,))

    def table(self, geometry: Geometry, weight: Tensor) -> RankTable:
        """A geometric ladder of ranks below the dense layer's cost, each tried by a short fit."""
        ranks = torch.logspace(0, math.log10(self._most(geometry)), _LADDER).round().long().unique()
        error = torch.tensor([self.error(weight, int(rank)) for rank in ranks], dtype=torch.float64)
        return RankTable(ranks[:, None], ranks * self.n_parameters(geometry, (1,)), error)

    def _most(self, geometry: Geometry) -> int:
        return max(min((geometry.n_weights - 1) // self.n_parameters(geometry, (1,)), *self.max_ranks(geometry)), 1)

    def error(self, weight: Tensor, rank: int) -> float:
        """Relative error of a short, uncorrected fit of all groups; an upper bound of the full fit's."""
        lost = 0.0
        for part in weight:
            tensor = self.tensor(part).float()
            lost += float((tensor - rebuild(cp(tensor, rank, sweeps=_SHORT_SWEEPS, corrections=0))).square().sum())
        return math.sqrt(lost / max(float(weight.square().sum()), 1e-30))


class CP4(CP):
    """One rank; factors (in, one a spatial axis, out)."""

    name = "cp4"

    def spatial_axes(self, n_axes: int) -> list[range]:
        """One depthwise layer an axis."""
        return [range(axis, axis + 1) for axis in range(n_axes)]
