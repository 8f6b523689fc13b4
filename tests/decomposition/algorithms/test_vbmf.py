import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctdr_lightning.decomposition.algorithms.vbmf import evbmf_rank, free_energy


def planted(rank: int, n: int = 60, m: int = 90, noise: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    left, right = torch.randn(n, rank, generator=generator), torch.randn(rank, m, generator=generator)
    return left @ right + noise * torch.randn(n, m, generator=generator)


@pytest.mark.parametrize("rank", [1, 3, 10, 25])
def test_finds_the_rank_under_the_noise(rank):
    assert evbmf_rank(planted(rank)) == rank


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 1.0, 1e4])
def test_scale_does_not_matter(scale):
    assert evbmf_rank(planted(7, noise=3.0) * scale) == evbmf_rank(planted(7, noise=3.0))


def test_orientation_does_not_matter():
    assert evbmf_rank(planted(7).T) == evbmf_rank(planted(7)) == 7


def test_noise_alone_has_rank_zero():
    assert evbmf_rank(torch.randn(64, 128)) == 0
    assert evbmf_rank(torch.zeros(8, 9)) == 0


@settings(max_examples=25, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**20))
def test_every_shape_gives_a_rank_within_bounds(n, m, seed):
    matrix = torch.randn(n, m, generator=torch.Generator().manual_seed(seed))
    assert 0 <= evbmf_rank(matrix) <= min(n, m)


def test_variance_is_the_minimum_of_the_free_energy_on_a_fine_grid():
    matrix = planted(12, noise=2.0).double()
    energy = torch.linalg.svdvals(matrix).square()
    rows, columns = matrix.shape
    energy = energy * (rows * columns / energy.sum())
    alpha = rows / columns
    tau = 2.5129 * math.sqrt(alpha)
    edge = (1 + tau) * (1 + alpha / tau)
    most = min(math.ceil(rows / (1 + alpha)) - 1, rows) - 1
    low = max(float(energy[most + 1]) / (columns * edge), float(energy[most + 1 :].mean()) / columns)
    grid = torch.linspace(low, float(energy.sum()) / (rows * columns), 4000, dtype=torch.float64)
    best = float(grid[free_energy(energy, grid, columns, alpha, edge).argmin()])
    assert evbmf_rank(matrix) == int((energy > columns * best * edge).sum())
