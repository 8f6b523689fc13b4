import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.recovery.phases import Freezer, RateScaler, chosen_parameters


def model():
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    decompose(net, rank=2, select="0")
    return net


def test_words_and_patterns():
    net = model()
    factors = {"0.svd.0.weight", "0.svd.1.weight", "0.svd.1.bias"}
    assert chosen_parameters(net, "factors") == factors
    assert chosen_parameters(net, "batchnorm") == {"1.weight", "1.bias"}
    assert chosen_parameters(net, ["2.*", "batchnorm"]) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert chosen_parameters(net, "all") == {name for name, _ in net.named_parameters()}
    with pytest.raises(ConfigError, match="head"):
        chosen_parameters(net, ["head.*"])


def test_what_the_user_froze_stays_frozen():
    net, freezer = model(), Freezer()
    net[2].weight.requires_grad_(False)
    assert freezer.freeze(net, "factors")
    assert not freezer.freeze(net, "factors")
    assert {name for name, p in net.named_parameters() if p.requires_grad} == chosen_parameters(net, "factors")
    assert freezer.thaw()
    assert {name for name, p in net.named_parameters() if not p.requires_grad} == {"2.weight"}


def test_the_rate_is_scaled_during_the_step_only_and_rises_in_the_warm_up():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = RateScaler()
    scaler.attach([optimizer])
    scaler.scale, scaler.warmup_steps = 0.5, 4
    moves = []
    for step in range(6):
        scaler.steps = step
        weight.grad = torch.ones(1)
        before = weight.item()
        optimizer.step()
        moves.append(before - weight.item())
        assert optimizer.param_groups[0]["lr"] == 1.0
    assert moves == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])


def test_the_rate_is_back_after_a_step_that_raised_and_after_release():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = RateScaler()
    scaler.attach([optimizer])
    scaler.scale = 0.5

    def fails():
        raise RuntimeError("as asked")

    with pytest.raises(RuntimeError):
        optimizer.step(fails)
    scaler.release()
    assert optimizer.param_groups[0]["lr"] == 1.0
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -1.0
