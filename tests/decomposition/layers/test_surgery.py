"""Layers put in, walked over, and made dense again."""

import pytest
import torch
from torch import nn

from ctdr_lightning import merge
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.layers.dense_again import make_dense
from ctdr_lightning.decomposition.layers.surgery import factorize, replace_everywhere, unweigh, walk, weigh_inputs
from tests.decomposition.cases import geometry_of


def factorized(layer, ranks=(3,), method="svd", **options):
    return factorize(layer, geometry_of(layer), method, ranks, **options)


def test_every_module_is_met_once_and_factorized_layers_are_not_entered():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()), factorized(nn.Linear(8, 8)))
    assert [name for name, _ in walk(net)] == ["", "0", "1", "1.1", "2"]


def test_a_layer_is_replaced_wherever_it_stands():
    shared, new = nn.Linear(4, 4), nn.Linear(4, 4)
    net = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    replace_everywhere(net, {shared: new})
    assert net["a"] is net["b"][0] is new


def test_weighted_factors_lose_least_of_the_outputs():
    torch.manual_seed(0)
    layer = nn.Linear(12, 10, bias=False)
    x = torch.randn(4000, 12) * torch.logspace(0, -2, 12)
    whitening = torch.linalg.cholesky(x.T @ x / len(x) + 1e-6 * torch.eye(12))[None]
    with torch.no_grad():
        plain, weighted = (
            float((factorized(layer, whitening=given)(x) - layer(x)).square().mean()) for given in (None, whitening)
        )
    assert weighted < 0.9 * plain


def test_unweighing_keeps_the_product_and_makes_the_first_factors_rows_orthonormal():
    torch.manual_seed(0)
    first, second = torch.randn(1, 3, 6).double(), torch.randn(1, 5, 3).double()
    whitening = torch.linalg.cholesky(torch.eye(6).double() * 2 + 0.1)[None]
    a, b = unweigh([weigh_inputs(first, whitening), second], whitening)
    assert torch.allclose(b @ a, second @ first)
    assert torch.allclose(a @ a.mT, torch.eye(3).double())


def test_only_the_chosen_layers_are_made_dense():
    net = nn.Sequential(factorized(nn.Linear(8, 8)), factorized(nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    before = net(x)
    make_dense(net, lambda name: name == "1")
    assert type(net[1]) is nn.Linear
    assert type(net[0]) is not nn.Linear
    assert torch.allclose(net(x), before, atol=1e-6)


def test_a_factorized_layer_alone_cannot_be_merged_in_place():
    with pytest.raises(ConfigError, match="itself a factorized layer"):
        merge(factorized(nn.Linear(8, 8)))
