"""Layers that were cut far are named."""

import warnings

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.decomposition.report import LossyLayerWarning


def net(n_outputs=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_outputs))


@pytest.mark.parametrize(
    ("rank", "named"),
    [
        ({"2": 3}, "'2' gives 10 outputs through rank 3"),
        ({"0": 4}, "'0' loses 89% of its weight's norm"),
    ],
)
def test_what_was_cut_far_is_named(rank, named):
    with pytest.warns(LossyLayerWarning, match=named):
        decompose(net(), rank=rank, progress=False)


@pytest.mark.parametrize(("model", "rank"), [(net(), {"0": 28}), (net(200), {"2": 40})])
def test_nothing_is_said_of_a_mild_cut_or_of_a_vocabulary(model, rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossyLayerWarning)
        decompose(model, rank=rank, progress=False)


def test_the_last_of_the_selected_layers_is_not_the_last_of_the_model():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossyLayerWarning)
        decompose(net(), rank=28, select="0", progress=False)


def test_measured_outputs_count_more_than_a_weight_s_error():
    model, inputs = net(), [torch.randn(256, 3) @ torch.randn(3, 64) for _ in range(1)]
    data = [inputs[0][start::4] for start in range(4)]  # three directions are all that reaches the first layer
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossyLayerWarning)
        report = decompose(model, rank={"0": 4}, data=data, progress=False)
    assert report.layers[0].relative_error > 0.7
    assert report.divergence < 0.01
