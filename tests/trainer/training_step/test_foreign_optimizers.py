"""Optimizers that are not torch's: what they keep and what they take is counted, and their runs stay exact."""

import re
import weakref

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback, Memory
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB, parse_bytes
from ctdr_lightning.memory import Trace
from ctdr_lightning.memory.holders.optimizer_bytes import predict, predict_for
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.training_step.optimizer.candidate_account import candidate_account
from ctdr_lightning.trainer.training_step.optimizer.resident import state_bytes
from ctdr_lightning.trainer.training_step.retry.standing import Standing
from ctdr_recipes.measure import storage_bytes
from tests import parts
from tests.trainer.training_step.runs import events_of
from tests.trainer.training_step.stand_ins import Compact, Lookahead, LowRank, Seeded, Wide
from tests.trainer.true_peaks import Peaks

WIDTH, BATCH, GAP = 384, 512, 4


def low_rank(module, kind=LowRank):
    weights = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    others = [param for param in module.parameters() if all(param is not weight for weight in weights)]
    return kind([{"params": weights, "rank": 16, "gap": GAP}, {"params": others}])


def compact(module):
    return Compact(module.parameters())


def wide(module):
    return Wide(module.parameters())


class Net(LightningModule):
    def __init__(self, make=low_rank):
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net, self.make = nn.Sequential(*layers), make

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.make(self)


def fit(make, *callbacks, **options):
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn((GAP + 3) * BATCH, WIDTH)), BATCH), None
    module = Net(make)
    return module, parts.fit(module, *callbacks, data=data, max_epochs=1, **options)


def budgeted(budget, **options):
    return CTDRCallback(rank=None, memory_budget=budget, verbose=False, **options)


def cut_by_weights():
    return CTDRCallback(rank=0.5, verbose=False, **grouped({"method": "svd", "data": None}))


def least_budget(make):
    with pytest.raises(InfeasibleBudgetError) as refused:
        fit(make, budgeted("3MiB"))
    return re.search(r"aise memory_budget to ([\d.]+ \w+)", refused.value.hint)[1]


def stepped(optimizer, n_steps, kept):
    """The bytes that a last step takes above the state."""
    for _ in range(n_steps):
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            param.grad = torch.randn_like(param)
        with PeakMeter() as meter:
            meter.live.track(kept(optimizer))
            optimizer.step()
    return meter.live.peak - storage_bytes(kept(optimizer))


def kept_by_low_rank(optimizer):
    states = optimizer.state.values()
    return [*(s["projector"].rows for s in states if "projector" in s), *(s["moment"] for s in states if "moment" in s)]


def test_state_in_objects_and_the_step_that_renews_it_are_foretold():
    optimizer = low_rank(Net())
    told = predict([optimizer])
    usual = stepped(optimizer, GAP, kept_by_low_rank)
    renewing = stepped(optimizer, 1, kept_by_low_rank)
    hidden = 4 * WIDTH * WIDTH * 4
    assert told.state == state_bytes([optimizer]) > hidden
    assert told.temporary == renewing > usual


def test_seeds_generators_and_values_that_are_read_do_not_keep_a_step_from_being_foretold():
    optimizer = low_rank(Net(), Seeded)
    told = predict([optimizer])
    stepped(optimizer, 2, lambda _: [])
    assert told.state == state_bytes([optimizer])
    taken = stepped(optimizer, 1, lambda o: [s["norm"] for s in o.state.values()])
    assert told.temporary == pytest.approx(taken, abs=64)


def test_a_quantised_state_counts_as_its_parts():
    optimizer = compact(Net())
    optimizer.compiles = False
    told = predict([optimizer])
    stepped(optimizer, 1, lambda _: [])
    n_elements = sum(p.numel() for p in Net().parameters())
    assert told.state == state_bytes([optimizer]) == n_elements + 8 * 4
    assert predict([optimizer]) == told, "of an optimizer that has stepped too"
    assert predict_for(optimizer, list(Net().parameters())) == told, "and of other parameters"


def test_to_foretell_a_step_steps_nothing_and_draws_nothing():
    module = Net(None)
    optimizer = Lookahead(torch.optim.Adam(module.parameters()))
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    before, drawn = [p.detach().clone() for p in module.parameters()], torch.get_rng_state()
    told = predict([optimizer])
    assert parts.same(before, list(module.parameters()))
    assert torch.equal(drawn, torch.get_rng_state())
    optimizer.step()
    assert told.state == state_bytes([optimizer]) == predict([optimizer.inner]).state


class PeaksWithProjectors(Peaks):
    """Each batch's true peak, with the tensors that projectors hold."""

    def on_train_batch_start(self, trainer, module, batch, index):
        super().on_train_batch_start(trainer, module, batch, index)
        self.meter.live.track(kept_by_low_rank(trainer.optimizers[0]))


@pytest.mark.slow
def test_every_batch_keeps_the_least_budget_and_the_weights_are_the_plain_run_s():
    plain, _ = fit(low_rank)
    budget = least_budget(low_rank)
    module, _ = fit(low_rank, budgeted(budget), watch := PeaksWithProjectors())
    assert parts.same(plain.state_dict(), module.state_dict())
    assert len(watch.bytes) == GAP + 3
    assert 0.95 * parse_bytes(budget) < max(watch.bytes[1:]) <= parse_bytes(budget)


def test_what_a_kernel_allocates_within_its_call_is_noticed_and_planned_for():
    plain, _ = fit(wide)
    callback = budgeted("24MiB")
    module, _ = fit(wide, callback)
    assert parts.same(plain.state_dict(), module.state_dict())
    gradient = 4 * WIDTH * WIDTH
    assert callback.run.memory.beside.optimizer.temporary == pytest.approx(8 * gradient, rel=0.01)
    assert any("After the backward a batch takes" in event for event in events_of(callback))


def test_a_step_that_compiles_itself_runs_and_is_counted_under_a_budget():
    plain, trainer = fit(compact)
    callback = budgeted("14MiB")
    module, _ = fit(compact, callback)
    assert parts.same(plain.state_dict(), module.state_dict())
    assert callback.run.memory.beside.optimizer.state == state_bytes(trainer.optimizers)
    assert callback.run.memory.session.plan.peak_bytes <= 14 * MIB


def test_old_state_is_free_to_go_when_an_optimizer_replaces_it():
    module = Net()
    optimizer = low_rank(module)
    stepped(optimizer, 1, kept_by_low_rank)
    standing = Standing()
    standing.reach({"module": module, "optimizers": [optimizer]})
    standing.release()
    old = weakref.ref(optimizer.state[module.net[0].weight]["projector"].rows)
    stepped(optimizer, GAP, kept_by_low_rank)
    assert old() is None


def test_a_candidate_s_optimizer_is_the_one_that_it_configures():
    module = Net()
    callback = budgeted("40MiB")
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    account = candidate_account(trainer, callback.run._options, low_rank(module), None, Trace((), (), (), 0), module)
    assert account.optimizer == predict([low_rank(module)])


class Collected(Net):
    def __init__(self):
        super().__init__()
        self.weights = [layer.weight for layer in self.net if isinstance(layer, nn.Linear)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.weights, 0.1)


def test_an_optimizer_of_layers_that_were_cut_is_refused():
    data = DataLoader(TensorDataset(torch.randn(2 * BATCH, WIDTH)), BATCH), None
    with pytest.raises(
        ConfigError, match=r"SGD was given 4 parameters of layers that the cut has replaced \(384x384\)"
    ):
        parts.fit(Collected(), cut_by_weights(), data=data, max_epochs=1)


def test_factors_are_in_the_group_that_the_module_puts_them_in():
    module, trainer = fit(low_rank, cut_by_weights())
    optimizer = trainer.optimizers[0]
    factors = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    assert len(factors) == 8
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == set(map(id, factors))
    assert all(optimizer.state[factor]["projector"].rows.shape[0] == 16 for factor in factors)


@pytest.mark.parametrize("option", [{"optimizer_state": "disk"}, {"optimizer_step": "in_backward"}])
def test_settings_that_need_updates_one_by_one_are_refused_in_one_sentence(option):
    said = r"stand_ins\.LowRank( cannot wait elsewhere: this optimizer)? is not known to update its parameters one by"
    with pytest.raises(ConfigError) as refused:
        fit(low_rank, budgeted("40MiB", memory=Memory(**option)))
    assert re.search(said, refused.value.problem), refused.value.problem
