"""The shapes that reach a model's layers, seen or given."""

import copy

import pytest
import torch
from torch import nn

from ctdr_lightning.decomposition.choose.observe import with_shapes
from ctdr_lightning.decomposition.choose.select import find_layers


def test_shapes_are_those_of_the_call_and_nothing_else_changes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 8, 1)).train()
    model[3].eval()
    x = torch.randn(2, 3, 9, 9)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    layers = with_shapes(model, find_layers(model), x)
    assert [layer.calls for layer in layers] == [((2, 3, 9, 9),), ((2, 8, 7, 7),)]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model[3].training) == (True, False)
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("inputs", [(torch.randn(2, 4),), {"x": torch.randn(2, 4)}, torch.randn(2, 4)])
def test_forms_of_example_input(inputs):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(input=x)

    model = Net()
    assert with_shapes(model, find_layers(model), inputs)[0].calls == ((2, 4),)
