"""One share spent over all layers, and what is struck out on the way."""

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose import by_share
from ctdr_lightning.decomposition.choose.batches import Batches
from ctdr_lightning.decomposition.choose.by_share import ModelOptions, Start
from ctdr_lightning.decomposition.choose.costs import CostModel
from ctdr_lightning.decomposition.choose.observe import with_shapes
from ctdr_lightning.decomposition.choose.request import Request
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.decomposition.choose.sensitivity import gather
from ctdr_lightning.decomposition.methods import KeepDenseError
from tests.decomposition.cases import decay_


def network():
    torch.manual_seed(0)
    return decay_(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))


def options(net, layers=None, evidence=None, gates=False):
    layers = layers or find_layers(net)
    names = [layer.name for layer in layers]
    request = Request.read(names, 0.5, "auto", "parameters", 1, CostModel(gates=gates), False)
    return ModelOptions(layers, request, evidence)


def left(choices):
    sizes = {"0": (32, 64), "2": (64, 64), "4": (64, 8)}
    factorized = {name: choice.ranks[0] * sum(sizes[name]) for name, choice in choices.factorized.items()}
    return sum(factorized.get(name, a * b) for name, (a, b) in sizes.items()) / sum(a * b for a, b in sizes.values())


@pytest.mark.parametrize("share", [0.75, 0.5, 0.2])
def test_the_share_is_kept_to_and_nearly_used_up(share):
    assert 0.95 * share < left(options(network()).choices(share)) <= share


def test_without_evidence_there_is_one_way_to_judge_errors_and_with_it_up_to_four():
    net = network()
    assert options(net).starts == (Start(),)
    layers = find_layers(net)
    evidence = gather(net, layers, Batches.draw([torch.randn(64, 32) for _ in range(4)], 4, None))
    found = options(net, evidence.noted(layers), evidence)
    assert len(found.starts) == len(set(map(str, found.starts))) == 4
    assert all(0.9 * 0.4 < left(found.choices(0.4, start=start)) <= 0.4 for start in found.starts)


def test_a_share_that_no_ranks_are_cheap_enough_for_names_the_costliest_layers():
    with pytest.raises(ConfigError, match=r"rank=0.001 of all parameters cannot be met: .* Most of it takes '2'"):
        options(network()).choices(0.001)


def test_a_candidate_that_runs_slower_is_struck_out_and_the_share_is_spent_again(monkeypatch):
    net = network()
    refused = []

    def check(layer, candidate, costs):
        if layer.name == "2":
            refused.append(candidate.parameters)
            raise KeepDenseError("slower")

    monkeypatch.setattr(by_share, "check_faster", check)
    layers = with_shapes(net, find_layers(net), torch.randn(16, 32))
    found = options(net, layers, gates=True).choices(0.9)
    assert refused == sorted(refused, reverse=True)
    assert refused
    assert "2" not in found.factorized
    assert left(found) <= 0.9


def test_a_second_call_on_a_model_that_spent_its_share_changes_nothing():
    net = network()
    decompose(net, 0.4, progress=False)
    assert not options(net).choices(0.4).factorized
