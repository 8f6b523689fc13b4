"""Batches to look at a model with: drawn, joined, and a model that stays untouched."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.batches import Batches, call, first_batches, merged, untouched


def test_every_fourth_of_the_first_eight_judges_and_is_never_fitted_to():
    drawn = Batches.draw(range(12), 12, lambda *_: None)
    assert drawn.judging == [3, 7]
    assert drawn.fitting == [0, 1, 2, 4, 5, 6]
    assert drawn.more == [8, 9, 10, 11]


def test_one_batch_is_fitted_to_and_judges():
    drawn = Batches.draw([5], 8, None)
    assert drawn.fitting == drawn.judging == [5]


def test_data_without_a_batch_is_refused():
    with pytest.raises(ConfigError, match="no batch"):
        Batches.draw([], 8, None)


def test_no_more_is_drawn_than_asked_for():
    source = iter(range(10))
    assert first_batches(source, 3) == [0, 1, 2]
    assert next(source) == 3


def test_a_model_is_called_with_a_batchs_input():
    net = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    for batch in (x, (x, torch.zeros(4)), [x], {"input": x}):
        assert torch.equal(call(net, batch), net(x))


def test_batches_of_one_structure_are_joined_along_their_samples():
    batches = [{"x": torch.full((n, 3), float(n)), "scale": torch.ones(3), "name": "a"} for n in (2, 2, 5)]
    batches.append({"x": torch.zeros(2, 4), "scale": torch.ones(3), "name": "a"})  # of other features
    joined = merged(batches)
    assert joined["x"].shape == (9, 3)
    assert joined["scale"].shape == (3,)  # no sample's
    assert joined["name"] == "a"


def test_modes_buffers_and_random_state_are_put_back_even_after_an_error():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    net[1].eval()
    mean, state = net[0].running_mean.clone(), torch.get_rng_state()

    def disturb():
        with untouched(net, training=True):
            assert not torch.is_grad_enabled()
            net(torch.randn(8, 3))
            assert not torch.equal(net[0].running_mean, mean)
            raise KeyError

    with pytest.raises(KeyError):
        disturb()
    assert torch.equal(net[0].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)
    assert (net[0].training, net[1].training) == (True, False)
    assert torch.is_grad_enabled()
