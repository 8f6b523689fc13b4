from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.accuracy.optimizers import put_back, rebuild, snapshot


class FakeStrategy:
    """What `rebuild` uses of a strategy, over a plain module."""

    def __init__(self, module, configure):
        self.module, self.configure = module, configure
        self.setup_optimizers(None)

    def setup_optimizers(self, trainer):
        self.optimizers, schedulers = self.configure(self.module)
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=scheduler) for scheduler in schedulers]


def adam(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def trained(configure):
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    strategy = FakeStrategy(module, configure)
    module(torch.ones(3, 16)).sum().backward()
    for optimizer in strategy.optimizers:
        optimizer.step()
    for config in strategy.lr_scheduler_configs:
        config.scheduler.step()
    return module, strategy


def test_untouched_moments_rates_and_schedules_are_carried_over():
    module, strategy = trained(adam)
    kept = {name: strategy.optimizers[0].state[module[1].get_parameter(name)] for name in ("weight", "bias")}
    decompose(module, rank=2, select="0")
    rebuild(SimpleNamespace(strategy=strategy))
    optimizer = strategy.optimizers[0]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module.parameters()]
    assert all(optimizer.state[module[1].get_parameter(name)] is state for name, state in kept.items())
    assert module[0].chain[0].weight not in optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert strategy.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_a_snapshot_goes_back_by_position():
    module, strategy = trained(adam)
    states = snapshot(strategy.optimizers)
    first = strategy.optimizers[0].state[module[0].weight]["exp_avg"].clone()
    strategy.optimizers[0].state[module[0].weight]["exp_avg"].zero_()
    put_back(strategy.optimizers, states)
    assert torch.equal(strategy.optimizers[0].state[module[0].weight]["exp_avg"], first)
    assert strategy.optimizers[0].param_groups[0]["lr"] == 0.05


def test_groups_that_depend_on_the_layers_are_refused():
    def by_layer(module):
        return [torch.optim.Adam([{"params": [p]} for p in module.parameters()])], []

    module, strategy = trained(by_layer)
    decompose(module, rank=2, select="0")
    with pytest.raises(ConfigError, match="parameter groups"):
        rebuild(SimpleNamespace(strategy=strategy))
