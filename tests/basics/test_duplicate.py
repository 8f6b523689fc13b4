"""Copies of modules that `copy.deepcopy` refuses."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from ctdr_lightning.basics.duplicate import duplicate


def of_a_loss(layer):
    layer.losses = {"last": [layer.weight.sum()]}
    return layer


def with_a_lock(layer):
    layer.lock = threading.Lock()
    layer.locks = [layer.lock]
    return layer


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.5)


CASES = {
    "plain": lambda layer: layer,
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "pruned": pruned,
    "a stored loss": of_a_loss,
    "a lock": with_a_lock,
    "a lock and weight_norm": lambda layer: with_a_lock(weight_norm(layer)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_copy_computes_as_the_module_and_is_trained_apart_from_it(case):
    model = nn.Sequential(CASES[case](nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    model(torch.randn(3, 4))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = duplicate(model)
    x = torch.randn(3, 4)
    assert torch.equal(copy.eval()(x), model.eval()(x))
    copy.train()(x).sum().backward()
    torch.optim.SGD(copy.parameters(), 0.1).step()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(copy[2].weight, model[2].weight)


def test_the_copy_shares_no_attribute_that_can_be_copied():
    layer = with_a_lock(nn.Linear(2, 2))
    layer.names = ["first"]
    copy = duplicate(layer)
    assert copy.lock is layer.lock
    assert copy.names == layer.names
    assert copy.names is not layer.names
