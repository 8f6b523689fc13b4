"""The request: ranks and methods by pattern, and the layers that they leave alone."""

import pytest
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.by_layer import choose_by_layer
from ctdr_lightning.decomposition.choose.costs import CostModel
from ctdr_lightning.decomposition.choose.request import Request, check_reachable
from ctdr_lightning.decomposition.choose.select import find_layers

NAMES = ("stem", "body", "head")


def network():
    net = nn.Sequential()
    net.stem, net.body, net.head = nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3, groups=32), nn.Linear(32, 10)
    return net


def request(rank=0.5, method="auto", allocate=None, multiple=1):
    return Request.read(NAMES, rank, method, allocate, multiple, CostModel(gates=False), False)


def by_name(asked):
    return {layer.name: [method.name for method in asked.methods_for(layer)] for layer in find_layers(network())}


def test_auto_means_three_methods_and_on_a_matrix_one():
    found = by_name(request())
    assert found == {"stem": ["tucker", "spatial", "svd"], "body": [], "head": ["svd"]}


def test_a_depthwise_layer_is_split_where_that_is_asked_for():
    assert by_name(request(method={"body": "spatial"}))["body"] == ["spatial"]


def test_each_layer_is_decided_by_itself_with_a_reason_where_it_stays():
    found = choose_by_layer(find_layers(network()), request({"stem": 0.3, "body": 0.5})).layers
    assert found["stem"].method is not None
    assert "depthwise" in found["body"].reason
    assert found["head"].reason == "no rank is given for it"


def test_a_candidate_that_is_no_smaller_is_refused():
    found = choose_by_layer(find_layers(network()), request({"head": 8}))
    assert "svd at rank 8 would have 336 weights, dense 320" in found.layers["head"].reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": {}}, "empty mapping"),
        ({"rank": {"tail": 0.5}}, "'tail' matches no layer"),
        ({"method": []}, "names no method"),
        ({"multiple": 0}, "multiple=0"),
        ({"rank": 4, "allocate": "parameters"}, "one share for all layers"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        request(**arguments)


def test_a_rank_above_every_layer_it_is_for_is_refused():
    check_reachable(find_layers(network()), request({"stem": 32}))
    with pytest.raises(ConfigError, match="rank=64 is above the largest rank, 48"):
        check_reachable(find_layers(network()), request({"stem": 64}))
