"""Tucker-2: a k x k convolution as 1 x 1, k x k on few channels, 1 x 1.

Paper: Kim et al., arXiv 1511.06530. Reproduced: the layer map and the two channel ranks. Changed: ST-HOSVD with two
HOOI sweeps for HOSVD, and the pair of ranks that a parameter budget buys is the one with the least error, not a fixed
aspect. Complexity: O(O I K (O + I)) a sweep; the rank table costs one full HOSVD.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ctdr_lightning.decomposition.algorithms.linalg import leading_basis, working
from ctdr_lightning.decomposition.algorithms.solvers import Solver
from ctdr_lightning.decomposition.methods.base import Method, Ranks, RankTable
from ctdr_lightning.decomposition.shapes.geometry import Geometry


class Tucker(Method):
    """Ranks (input channels, output channels), a group."""

    name = "tucker"

    def supports(self, geometry: Geometry) -> bool:
        """Convolutions with more than one tap."""
        return not geometry.is_matrix

    def factor_geometries(self, geometry: Geometry, ranks: Ranks) -> tuple[Geometry, ...]:
        """All of stride, padding and dilation stays with the core."""
        narrow_in, narrow_out = (rank * geometry.groups for rank in ranks)
        return (
            geometry.pointwise(geometry.in_size, narrow_in),
            geometry.only_axes(narrow_in, narrow_out, range(geometry.n_axes)),
            geometry.pointwise(narrow_out, geometry.out_size),
        )

    def unfoldings(self, weight: Tensor) -> list[Tensor]:
        """Input-channel and output-channel unfoldings."""
        return [weight.movedim(1, 0).flatten(1), weight.flatten(1)]

    def feasible(self, geometry: Geometry, ranks: Ranks) -> Ranks:
        """Neither rank above the other times the taps."""
        narrow_in, narrow_out = super().feasible(geometry, ranks)
        return min(narrow_in, narrow_out * geometry.n_taps), min(narrow_out, narrow_in * geometry.n_taps)

    def solve(self, weight: Tensor, ranks: Ranks, solver: Solver) -> list[Tensor]:
        """First and last layer orthonormal, all energy in the core."""
        core, (out_factor, in_factor, taps) = solver.tucker(weight.flatten(2), (ranks[1], ranks[0]))
        ones = (1,) * (weight.ndim - 2)
        return [
            in_factor.T.reshape(1, *in_factor.T.shape, *ones),
            (core @ taps.T).reshape(1, ranks[1], ranks[0], *weight.shape[2:]),
            out_factor.reshape(1, *out_factor.shape, *ones),
        ]

    def ranks_of(self, geometry: Geometry, shapes: Sequence[torch.Size]) -> Ranks:
        """Outputs of the first layer, inputs of the last."""
        return shapes[0][0] // geometry.groups, shapes[-1][1]

    def table(self, geometry: Geometry, weight: Tensor) -> RankTable:
        """Every pair of ranks at once: cumulative energy of the full HOSVD core."""
        energy = torch.stack([_core_energy(part.flatten(2)) for part in working(weight)]).sum(0)
        kept = energy.cumsum(0).cumsum(1).cpu()
        error = (1 - kept / kept[-1, -1].clamp_min(1e-300)).clamp_min(0).sqrt()
        a = torch.arange(1, kept.shape[0] + 1)[:, None].expand_as(kept)
        b = torch.arange(1, kept.shape[1] + 1)[None].expand_as(kept)
        parameters = geometry.in_size * a + geometry.n_taps * geometry.groups * a * b + geometry.out_size * b
        table = RankTable(torch.stack((a, b), -1).flatten(0, 1), parameters.flatten(), error.flatten())
        return table.where(((a <= b * geometry.n_taps) & (b <= a * geometry.n_taps)).flatten())


def _core_energy(weight: Tensor) -> Tensor:
    """Energy (I', O') of each channel pair of the full HOSVD core of an (O, I, K) weight, largest first."""
    unfolded_in, unfolded_out = weight.movedim(1, 0).flatten(1), weight.flatten(1)
    in_basis = leading_basis(unfolded_in, min(unfolded_in.shape))
    out_basis = leading_basis(unfolded_out, min(unfolded_out.shape))
    narrow = torch.tensordot(out_basis, weight, dims=([0], [0]))
    return torch.einsum("ia,oik->oak", in_basis, narrow).square().sum(2).T
