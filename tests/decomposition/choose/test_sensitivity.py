"""Factors that lose least of the outputs, not of the weights."""

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.decomposition import METHODS
from ctdr_lightning.decomposition.choose.batches import Batches
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.decomposition.choose.sensitivity import gather
from ctdr_lightning.decomposition.layers.surgery import factorize
from tests.decomposition.cases import geometry_of


def correlated(n_samples: int, n_features: int) -> torch.Tensor:
    mix = torch.linalg.qr(torch.randn(n_features, n_features)).Q * torch.arange(1, n_features + 1) ** -1.0
    return torch.randn(n_samples, n_features) @ mix.T


def seen(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The whitening that a layer gets from one batch."""
    model = nn.Sequential(layer)
    return gather(model, find_layers(model), Batches.draw([x], 1, None)).whitening["0"]


def test_linear_layer_reaches_the_best_output_error():
    layer, x = nn.Linear(24, 20, bias=False), correlated(4000, 24)
    geometry = geometry_of(layer)
    new = factorize(layer, geometry, "svd", (6,), whitening=seen(layer, x))
    plain = factorize(layer, geometry, "svd", (6,))
    y = layer(x)
    best = torch.linalg.svdvals(y)[6:].norm() / y.norm()  # Eckart-Young on the outputs themselves
    found, other = ((m(x) - y).norm() / y.norm() for m in (new, plain))
    assert found <= 1.02 * best
    assert found < 0.9 * other


@pytest.mark.parametrize("method", ["tucker", "cp", "cp4", "tt", "spatial", "svd"])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_lose_less_of_their_outputs(method, groups):
    layer = nn.Conv2d(16, 16, 3, padding=1, groups=groups)
    x = correlated(8 * 8 * 8, 16).reshape(8, 8, 8, 16).permute(0, 3, 1, 2)
    geometry = geometry_of(layer)
    ranks = METHODS[method].uniform(geometry, 5 if method != "cp" else 12)
    weight = seen(layer, x)
    new, plain = factorize(layer, geometry, method, ranks, whitening=weight), factorize(layer, geometry, method, ranks)
    y = layer(x)
    assert (new(x) - y).norm() < (plain(x) - y).norm()
    first = new.factor_layers[0].weight.detach().flatten(1)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(len(first)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["tucker", "tt", "spatial", "svd", "cp"])
def test_full_rank_stays_exact(method):
    layer, x = nn.Conv2d(6, 8, 3), torch.randn(4, 6, 7, 7)
    geometry = geometry_of(layer)
    new = factorize(layer, geometry, method, METHODS[method].max_ranks(geometry), whitening=seen(layer, x))
    torch.testing.assert_close(new(x), layer(x), rtol=1e-3, atol=1e-4)


def test_covariances_are_centred_and_over_all_positions():
    layer, x = nn.Conv1d(6, 4, 3, groups=2), torch.randn(3, 6, 5) + 7
    flat = x.permute(0, 2, 1).reshape(-1, 2, 3)
    factor = seen(layer, x)
    for group in range(2):
        covariance = torch.cov(flat[:, group].T, correction=0).double()
        top = torch.linalg.eigvalsh(covariance)[-1]
        expected = covariance / top + 1e-3 * torch.eye(3)
        torch.testing.assert_close(factor[group] @ factor[group].T, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["tensor", "pair"])
def test_whole_model_from_batches(form):
    model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24)).train()
    plain = nn.Sequential(*model[:])
    batches = [correlated(200, 24) for _ in range(3)]
    x, before = batches[0], {key: value.clone() for key, value in model.state_dict().items()}
    y = plain.eval()(x)
    data = batches if form == "tensor" else [(batch, torch.zeros(200)) for batch in batches]
    report = decompose(model.train(), rank=8, data=data)
    assert len(report.factorized) == 2
    assert model.training
    kept = ("1.weight", "1.bias", "1.num_batches_tracked")  # running statistics follow the layer before them
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in kept)
    assert (model.eval()(x) - y).norm() < y.norm()


def test_inputs_far_from_zero_with_hardly_any_spread_still_give_a_whitening():
    x = 3e3 + 1e-3 * correlated(64, 48)  # what is left of the moments less the mean is rounding
    found = seen(nn.Linear(48, 8), x)
    assert bool(torch.isfinite(found).all())
    assert bool((found.diagonal(dim1=1, dim2=2) > 0).all())


def test_very_wide_layers_go_by_their_weights():
    model = nn.Sequential(nn.Linear(4097, 8), nn.ReLU(), nn.Linear(8, 2))
    found = gather(model, find_layers(model), Batches.draw([torch.randn(4, 4097)], 1, None))
    assert set(found.whitening) == {"2"}
    assert set(found.calls) == set(found.fisher) == {"0", "2"}
