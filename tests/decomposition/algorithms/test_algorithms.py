"""Solvers against tensorly's, and what they promise on their own."""

import pytest
import torch
from torch import nn

from ctdr_lightning.decomposition import METHODS, SOLVERS
from ctdr_lightning.decomposition.algorithms import cp as cp_module
from ctdr_lightning.decomposition.algorithms.cp import balance, cp, degeneracy, exact_rank, sensitivity
from ctdr_lightning.decomposition.algorithms.linalg import leading_basis, spectrum
from ctdr_lightning.decomposition.algorithms.rebuild import rebuild
from ctdr_lightning.decomposition.layers.surgery import factorize
from ctdr_lightning.decomposition.methods.cp import DegenerateFactorsWarning
from tests.decomposition.cases import geometry_of


def kernel(n_out: int, n_in: int, n_taps: int, power: float = 0.7) -> torch.Tensor:
    """A tensor whose channel spectra fall as those of trained convolutions do, and five percent of noise."""
    t = torch.randn(n_out, n_in, n_taps)
    for mode in (0, 1):
        basis = torch.linalg.qr(torch.randn(t.shape[mode], t.shape[mode])).Q
        falling = basis * torch.arange(1, t.shape[mode] + 1) ** -power
        t = torch.tensordot(t, falling, dims=([mode], [1])).movedim(-1, mode)
    return t / t.norm() + 0.05 * torch.randn(t.shape) / t.numel() ** 0.5


def error(found, tensor):
    return float((rebuild(found).to(tensor) - tensor).norm() / tensor.norm())


@pytest.mark.parametrize("ranks", [(16, 16), (8, 30), (48, 40)])
def test_tucker_is_as_exact_as_tensorlys(ranks):
    t = kernel(48, 40, 9)
    ours, theirs = (error(SOLVERS[name].tucker(t, ranks), t) for name in ("gram", "tensorly"))
    assert ours <= theirs + 1e-3
    core, factors = SOLVERS["gram"].tucker(t, ranks)
    for factor in factors:
        torch.testing.assert_close(factor.T @ factor, torch.eye(factor.shape[1]), rtol=0, atol=1e-5)
    assert float(t.norm().square() - core.norm().square()) == pytest.approx((ours * float(t.norm())) ** 2, abs=1e-4)


@pytest.mark.parametrize("rank", [4, 16, 40])
def test_svd_is_as_exact_as_tensorlys(rank):
    m = kernel(48, 40, 1)[..., 0]
    ours, theirs = (error(SOLVERS[name].svd(m, rank), m) for name in ("gram", "tensorly"))
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("ranks", [(8, 12, 8), (16, 30, 20)])
def test_tensor_train_is_as_exact_as_tensorlys(ranks):
    t = kernel(32, 24, 9).reshape(32, 24, 3, 3).permute(1, 2, 3, 0)
    ours, theirs = (error(SOLVERS[name].tt(t, ranks), t) for name in ("gram", "tensorly"))
    assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("rank", [8, 24, 60])
def test_cp_is_as_exact_as_tensorlys(rank):
    t = kernel(32, 24, 9)
    assert error(SOLVERS["gram"].cp(t, rank), t) <= error(SOLVERS["tensorly"].cp(t, rank), t) + 1e-3


def test_gram_basis_keeps_small_singular_values_of_single_precision_weights():
    u, v = (torch.linalg.qr(torch.randn(60, 60)).Q for _ in range(2))
    values = torch.logspace(0, -5, 60)
    m = (u * values @ v).double()
    torch.testing.assert_close(spectrum(m), torch.linalg.svdvals(m), rtol=1e-3, atol=1e-7)
    for matrix in (m[:40], m[:, :40]):
        basis = leading_basis(matrix, 30)
        lost = matrix - basis @ (basis.T @ matrix)
        assert lost.norm() <= 1.001 * torch.linalg.svdvals(matrix)[30:].norm()


class TestCP:
    def test_correction_lowers_sensitivity_within_its_slack(self):
        t = kernel(32, 24, 9)
        plain = cp(t, 32, sweeps=50, tolerance=0, corrections=0)
        corrected = cp(t, 32, sweeps=50, tolerance=0, slack=1.02)
        assert error(corrected, t) <= 1.0201 * error(plain, t)
        assert sensitivity(corrected.factors) < 0.8 * sensitivity(plain.factors)
        assert degeneracy(corrected.factors, t) < degeneracy(plain.factors, t)

    def test_no_slack_keeps_the_error(self):
        t = kernel(20, 20, 9)
        plain, corrected = cp(t, 12, corrections=0), cp(t, 12, slack=1.0)
        assert error(corrected, t) <= error(plain, t) + 1e-4

    def test_exact_rank_is_exact(self):
        t = torch.randn(5, 7, 3)
        assert exact_rank(t.shape) == 15
        assert error(cp(t, 15), t) < 1e-6
        assert error(cp(t, 20), t) < 1e-6

    def test_balance_changes_norms_only(self):
        factors = [torch.randn(5, 3) * 100, torch.randn(4, 3), torch.randn(6, 3) * 0.01]
        even = balance(factors)
        norms = torch.stack([factor.norm(dim=0) for factor in even])
        torch.testing.assert_close(norms, norms[:1].expand_as(norms))
        before, after = (torch.einsum("ar,br,cr->abc", *each) for each in (factors, even))
        torch.testing.assert_close(before, after)

    def test_four_factors(self):
        t = kernel(24, 20, 9).reshape(24, 20, 3, 3)
        assert error(cp(t, 40), t) < error(cp(t, 10), t) < 1

    def test_the_same_every_time_and_no_random_number_drawn(self):
        t, state = kernel(16, 12, 9), torch.get_rng_state()
        first, second = cp(t, 14), cp(t, 14)
        assert all(torch.equal(a, b) for a, b in zip(first.factors, second.factors, strict=True))
        assert torch.equal(torch.get_rng_state(), state)

    def test_alarm_when_components_cancel(self):
        a, b, c, noise = (torch.randn(n) for n in (6, 5, 4, 6))

        def cancelling(tensor, rank):
            from tensorly.cp_tensor import CPTensor

            factors = [torch.stack((a, -a + 1e-3 * noise), 1) * 1e3, torch.stack((b, b), 1), torch.stack((c, c), 1)]
            return CPTensor((torch.ones(2), [factors[0][:, :rank], *factors[1:]]))

        layer = nn.Conv2d(6, 4, (5, 1))
        solver = type(SOLVERS["gram"])(None, None, cancelling, None)
        with SOLVERS.temporarily({"cancelling": solver}), pytest.warns(DegenerateFactorsWarning, match="cancel"):
            factorize(layer, geometry_of(layer), "cp", (2,), "cancelling")


def test_long_plain_sweeps_degenerate_and_ours_do_not():
    t = kernel(24, 24, 9)
    assert degeneracy(cp(t, 30, sweeps=500, tolerance=0, corrections=0).factors, t) > 5
    assert degeneracy(cp(t, 30).factors, t) < 2


def test_default_sweeps_are_few():
    assert cp_module.SWEEPS <= 60


@pytest.mark.parametrize("method", METHODS)
def test_zero_weights_do_not_break(method):
    layer = nn.Linear(8, 8) if method == "tt_linear" else nn.Conv2d(8, 8, 3)
    nn.init.zeros_(layer.weight)
    new = factorize(layer, geometry_of(layer), method, METHODS[method].uniform(geometry_of(layer), 2))
    assert torch.isfinite(new.weight).all()
    assert float(new.weight.abs().max()) < 1e-6
