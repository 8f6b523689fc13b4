"""One suite for every registered method on every layer kind it says it supports."""

import copy

import pytest
import torch
from torch import nn

from ctdr_lightning.decomposition import METHODS, SOLVERS
from ctdr_lightning.decomposition.choose.rank import measured
from ctdr_lightning.decomposition.layers.from_checkpoint import rebuild_from_state_dict
from ctdr_lightning.decomposition.layers.surgery import factorize
from tests.decomposition.cases import LAYERS, decay_, geometry_of, layer_and_input

PAIRS = [
    (method, name)
    for method in METHODS
    for name, (make, _) in LAYERS.items()
    if METHODS[method].supports(geometry_of(make()))
]


def test_every_layer_has_a_method_and_every_method_a_layer():
    assert {name for _, name in PAIRS} == set(LAYERS)
    assert {method for method, _ in PAIRS} == set(METHODS)


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_full_rank_is_the_dense_layer(method, name):
    layer, x = layer_and_input(name)
    geometry = geometry_of(layer)
    new = factorize(layer, geometry, method, METHODS[method].max_ranks(geometry))
    expected, found = layer(x), new(x)
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (new.weight - layer.weight).norm() <= 1e-5 * layer.weight.norm()
    assert new.bias is layer.bias if hasattr(layer, "bias") else new.bias is None


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_low_rank_runs_trains_merges_and_rebuilds(method, name):
    layer, x = layer_and_input(name)
    geometry = geometry_of(layer)
    ranks = METHODS[method].uniform(geometry, 2)
    new = factorize(layer, geometry, method, ranks)
    y = new(x)
    y.sum().backward()
    assert all(p.grad is not None for p in new.parameters())
    assert sum(s.weight.numel() for s in new.factor_layers) == METHODS[method].n_parameters(geometry, ranks)

    dense = new.to_dense()
    assert repr(dense) == repr(layer)
    torch.testing.assert_close(dense(x), y, rtol=1e-4, atol=1e-5)

    model = nn.Sequential(copy.deepcopy(layer))
    state = {f"0.{key}": value for key, value in new.state_dict().items()}
    rebuild_from_state_dict(model, state)
    model.load_state_dict(state)
    assert model[0].ranks == ranks
    assert torch.equal(model(x), y)


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_table_bounds_the_error_and_counts_parameters(method, name):
    layer, _ = layer_and_input(name)
    decay_(layer)
    geometry = geometry_of(layer)
    weight = geometry.canonical(layer.weight.detach())
    table = METHODS[method].table(geometry, weight.double())
    for row in torch.linspace(0, len(table.error) - 1, 4).long().unique():
        candidate = table.candidate(METHODS[method], row)
        assert METHODS[method].feasible(geometry, candidate.ranks) == candidate.ranks
        assert candidate.parameters == METHODS[method].n_parameters(geometry, candidate.ranks)
        new = factorize(layer, geometry, method, candidate.ranks)
        slack = (
            1.02 if method.startswith("cp") else 1.0
        )  # a CP table comes from short fits, the layer from conditioned ones
        assert (
            float((new.weight - layer.weight).detach().norm() / layer.weight.detach().norm())
            <= slack * candidate.error + 1e-5
        )


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("method", "name"), [(m, n) for m, n in PAIRS if n in ("conv2d groups=1", "linear")])
def test_every_solver_fits_every_method(method, name, solver):
    layer, x = layer_and_input(name)
    decay_(layer)
    geometry = geometry_of(layer)
    ranks = METHODS[method].uniform(geometry, 3)
    errors = {}
    for each in (solver, "gram"):
        new = factorize(layer, geometry, method, ranks, each)
        errors[each] = float((new.weight - layer.weight).detach().norm() / layer.weight.detach().norm())
        assert new(x).shape == layer(x).shape
    assert errors["gram"] <= errors[solver] + 0.02
    assert errors[solver] < 0.9


@pytest.mark.parametrize("method", [m for m, n in PAIRS if n == "conv2d groups=1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(method, dtype):
    layer = decay_(nn.Conv2d(8, 8, 3)).to(dtype)
    geometry = geometry_of(layer)
    new = factorize(layer, geometry, method, METHODS[method].max_ranks(geometry))
    assert all(p.dtype == dtype for p in new.parameters())
    tolerance = 1e-6 if dtype == torch.float64 else 0.03
    assert (new.weight.double() - layer.weight.double()).norm() <= tolerance * layer.weight.double().norm()


def test_depthwise_by_spatial_has_rank_one_a_channel():
    layer = nn.Conv2d(6, 6, 5, padding=2, groups=6)
    with torch.no_grad():
        layer.weight.copy_(torch.einsum("ch,cw->chw", torch.randn(6, 5), torch.randn(6, 5))[:, None])
    new = factorize(layer, geometry_of(layer), "spatial", (1,))
    x = torch.randn(2, 6, 9, 9)
    torch.testing.assert_close(new(x), layer(x), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in new.parameters()) == 6 * 10 + 6


def test_output_size_of_a_transposed_convolution():
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1)
    x = torch.randn(1, 4, 5, 6)
    expected = layer(x, output_size=[10, 11])
    for method in ("tucker", "cp4", "tt", "spatial", "svd"):
        new = factorize(layer, geometry_of(layer), method, METHODS[method].max_ranks(geometry_of(layer)))
        torch.testing.assert_close(new(x, output_size=[10, 11]), expected, rtol=1e-4, atol=1e-5)


def test_measured_error_is_the_true_one():
    layer = decay_(nn.Conv2d(8, 8, 3))
    geometry = geometry_of(layer)
    weight = geometry.canonical(layer.weight.detach())
    candidate = METHODS["cp"].within(geometry, weight.double(), 200, 1)
    new = factorize(layer, geometry, "cp", candidate.ranks)
    expected = float((new.weight - layer.weight).detach().norm() / layer.weight.detach().norm())
    assert measured(candidate, geometry, weight.double()).error == pytest.approx(expected, abs=1e-3)
