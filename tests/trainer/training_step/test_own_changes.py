"""Steps that change their own parameters and buffers run in parts as whole, or are refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.guide.events import PlanMade
from ctdr_lightning.trainer.training_step.events import BatchesCut
from ctdr_lightning.trainer.training_step.sub_batches.checks import check_mean
from tests import parts
from tests.trainer.training_step.test_sub_batches import (
    SINGLE,
    WIDTH,
    Deep,
    RunsOut,
    equal,
    fit,
    large,
    three_parts,
)
from tests.trainer.training_step.test_whole_batch import TruePeak

SGD = torch.optim.SGD


class Targets(Deep):
    """A target network is the moving average of the trained one, updated before it is asked."""

    def __init__(self, wide=WIDTH):
        super().__init__(SGD)
        self.online = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch, index):
        with torch.no_grad():
            for own, average in zip(self.online.parameters(), self.target.parameters(), strict=True):
                average.mul_(0.5).add_(own, alpha=0.5)
            wanted = self.target(batch[0])
        return super().training_step(batch, index) + F.mse_loss(self.online(batch[0]), wanted)


class Wide(Targets):
    """The target's weights are too large for the copies of a retry."""

    def __init__(self, wide=2048):
        super().__init__(wide)


class Counts(Deep):
    def __init__(self):
        super().__init__(SGD)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, index):
        self.steps = self.steps + 1
        return super().training_step(batch, index) * (1 + self.steps / 10)


class Spectral(Deep):
    def __init__(self):
        super().__init__(SGD)
        self.net[0] = spectral_norm(self.net[0])


@pytest.mark.parametrize("make", [Targets, Wide, Counts, Spectral])
def test_each_part_finds_what_the_whole_batch_finds(make):
    plain, cut = fit(make()), fit(make(), sub_batches=3)
    equal(plain.gradients, cut.gradients, SINGLE)
    equal([list(plain.module.state_dict().values())], [list(cut.module.state_dict().values())], SINGLE)
    assert cut.module.calls > 2 * plain.module.calls


def test_the_copies_are_counted():
    peak, budget = TruePeak(), 7 * 2**20
    cut = fit(Wide(1100), peak, memory_budget=budget, loader=large(), max_epochs=1, sub_batches="auto")
    assert sum(tensor.nbytes for tensor in cut.module.target.parameters()) > 0.07 * budget
    measured, predicted = (
        cut.trainer.callback_metrics[f"ctdr/{name}_gib"].item() * 2**30 for name in ("peak_memory", "predicted_peak")
    )
    assert peak.use.peak_bytes <= measured <= predicted <= budget
    assert {type(event) for event in cut.callback.run.memory.session.events} == {BatchesCut, PlanMade}


class Queues(Deep):
    def __init__(self):
        super().__init__(SGD)
        self.register_buffer("queue", torch.zeros(4))

    def training_step(self, batch, index):
        self.queue.copy_(self.net(batch[0]).detach().mean(0))
        return super().training_step(batch, index)


def test_changes_by_the_samples_are_refused():
    with pytest.raises(ConfigError, match="'queue', which training_step sets by the samples of its batch"):
        fit(Queues(), sub_batches=2)


class Seldom(Counts):
    """Its buffer changes in the second batch alone, which the check of the first one does not see."""

    def training_step(self, batch, index):
        if index == 1:
            self.steps += 1
        return Deep.training_step(self, batch, index)


def test_a_change_that_the_check_did_not_see_is_refused():
    with pytest.raises(ConfigError, match="'steps', which training_step sets in some batches alone"):
        fit(Seldom(), sub_batches=2)


class Interrupted(RunsOut):
    """Memory seems to run out in a part; a moving average, and a buffer that a retry puts back and no step changes."""

    def __init__(self, at):
        super().__init__(at)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("average", torch.zeros(WIDTH))

    def training_step(self, batch, index):
        with torch.no_grad():
            self.average.mul_(0.5).add_(self.net[0].bias, alpha=0.5)
        return self.scale * super().training_step(batch, index) + self.average.square().mean()


@pytest.mark.parametrize("at", [7, 8])
def test_a_part_that_runs_again_finds_what_it_found(at):
    plain, cut = three_parts(Interrupted(0)), three_parts(Interrupted(at))
    assert RunsOut.failed == 1
    assert parts.same(plain.module.state_dict(), cut.module.state_dict())
    assert plain.module.average.any()


class Dice(Deep):
    """One minus an overlap over the whole batch, which is nearly that of parts where a network is untrained."""

    def training_step(self, batch, index):
        found, true = self.net(batch[0]).softmax(1), F.one_hot(batch[1], 4)
        return (1 - 2 * (found * true).sum(0) / (found + true).sum(0)).mean() + 100


def test_a_loss_that_is_nearly_a_mean_is_refused():
    with pytest.raises(ConfigError, match="The loss is not a mean over samples"):
        fit(Dice(), sub_batches=2)


@pytest.mark.parametrize("make", [Targets, Wide])
def test_the_check_names_the_changes_and_leaves_none(make):
    module, batch = make(), (torch.randn(8, WIDTH), torch.arange(8) % 4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    checked = check_mean(module, lambda few: module.training_step(few, 0), batch, half=False)
    assert set(checked.changed) == {f"target.{name}" for name, _ in module.target.named_parameters()}
    assert not checked.unknown
    assert parts.same(before, module.state_dict())
