"""FSDP2 units whose weights stay gathered: chosen within the budget, alike on all ranks, and undone after the fit."""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning import CTDRCallback
from ctdr_lightning.memory.account.fit import least_peak_bytes
from ctdr_lightning.memory.account.gathers import choose_staying
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.traces.gathers import gathers_of, staying
from ctdr_lightning.trainer.strategies import settle_units
from ctdr_lightning.trainer.training_step import memory_stage, unit_weights
from ctdr_lightning.trainer.training_step.events import UnitsChosen
from tests import forks, parts
from tests.trainer.test_sharded_peaks import Gpt, Mlp, check_peaks, run

HUGE = 2**30
ALL = tuple(f"blocks.{i}" for i in range(4))


@contextmanager
def gathers_of_seconds(seconds):
    """No test depends on a clock: each gather is said to take so long."""
    with patch.object(memory_stage, "settle_units", lambda module: dict.fromkeys(settle_units(module), seconds)):
        yield


class Kept(Mlp):
    """The user keeps all weights gathered."""

    def configure_model(self):
        super().configure_model()
        for block in self.blocks:
            block.set_reshard_after_forward(False, recurse=False)


class Wordy(Gpt):
    """The bytes of a step are most while all weights that stay are there: at its loss."""

    def __init__(self):
        super().__init__(vocabulary=4000)


class Odd(Mlp):
    """Units of which nothing is proved: two that share a gather, one that runs twice, one inside of it."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        fully_shard([self.blocks[0], self.blocks[1]], mesh=mesh)
        fully_shard(self.blocks[2][2], mesh=mesh)
        fully_shard(self.blocks[2], mesh=mesh, reshard_after_forward=False)
        fully_shard(self.blocks[3], mesh=mesh)
        fully_shard(self, mesh=mesh)
        self.blocks[3][0].requires_grad_(False)

    def forward(self, x):
        x = self.tokens(x)
        for index in (0, 1, 2, 2, 3):
            x = self.blocks[index](x)
        return self.head(x)


def settings(module):
    """Whether each inner unit is freed after its forward: FSDP2 has no public way to ask."""
    units = {name: m for name, m in module.named_modules() if name and hasattr(m, "set_reshard_after_forward")}
    found = {n: unit._get_fsdp_state()._fsdp_param_groups[0].post_forward_mesh_info for n, unit in units.items()}
    return {name: mesh is not None for name, mesh in found.items()}


def on_all_ranks(thing):
    """What each rank has."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def trained(kind, budget=None, **options):
    """The module, its gradients, and the callback."""
    parts.seed_everything(0, verbose=False)
    module = kind()
    ours = [] if budget is None else [CTDRCallback(rank=None, memory_budget=budget, verbose=False)]
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    data, batch_size = module.data()
    data = options.pop("data", (DataLoader(data, batch_size), None))
    parts.fit(module, *ours, data=data, strategy=strategy, devices=2, **{"max_steps": 5, **options})
    return module, [p.grad.to_local().clone() for p in module.parameters() if p.grad is not None], *ours


def check_same(kind, budget, seconds, **options):
    """Train with and without the callback; returns it where both are equal to the bit, on a choice of all ranks."""
    plain, gradients = trained(kind, **options)
    with gathers_of_seconds(seconds):
        module, same, ours = trained(kind, budget, **options)
    assert parts.same(plain.losses, module.losses)
    assert parts.same(gradients, same)
    assert settings(module) == settings(plain)
    events = ours.run.memory.session.events
    assert not parts.other_ops(events)
    assert len([event for event in events if isinstance(event, UnitsChosen)]) == 1
    first, *others = on_all_ranks(ours.run.memory.units.key)
    assert all(other == first for other in others)
    return ours


def check_budgets():
    """From all units to none of them, over budgets."""
    free, kept = (run(kind)[2].true.least for kind in (Mlp, Kept))
    assert free < 0.95 * kept
    assert set(check_same(Mlp, HUGE, 0.0).run.memory.units.key) == set(ALL)
    with proposals() as found:  # a step whose buffer a thread of gloo's frees late would be planned anew, for less
        between = check_same(Mlp, (3 * free + kept) // 4, 1e-9)
        assert 0 < len(between.run.memory.units.key) < len(ALL)
        assert found.pop()[-1].recompute_s == 0
        slow = check_same(Mlp, int(0.8 * free), 10.0)
        assert set(slow.run.memory.units.key) == set(ALL)
        assert found.pop()[-1].recompute_s > 0


@contextmanager
def proposals():
    """What is asked for on this rank, and what is proposed."""
    found = []

    def noting(account, gathers, *args):
        found.append((account, gathers, choose_staying(account, gathers, *args)))
        return found[-1][-1]

    with patch.object(unit_weights, "choose_staying", noting):
        yield found


class Checkpointed(Gpt):
    """Each unit's forward runs once more in the backward, where FSDP2 leaves its weights gathered."""

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def check_checkpointed():
    with set_checkpoint_early_stop(False):  # else it ends before the unit's forward does
        check_same(Checkpointed, HUGE, 1.0)


def test_units_that_run_again_in_the_backward_train_as_before():
    assert forks.run(check_checkpointed, ranks=2, timeout_s=200) == [0, 0]


def check_smallest():
    with proposals() as found:
        check_same(Wordy, HUGE, 1.0)
        (account, gathers, proposed) = found.pop()
        assert len(proposed.units) == len(gathers) == 3
        least = max(on_all_ranks(least_peak_bytes(account.standing, account.rest_bytes, "auto")))
        last = replace(account, step=staying(account.step, gathers[-1:]))
        assert account.floor_bytes <= least < last.floor_bytes
        assert not check_same(Wordy, least, 1.0).run.memory.units.key


@pytest.mark.slow
def test_no_weights_stay_under_a_budget_that_none_fit():
    assert forks.run(check_smallest, ranks=2, timeout_s=200) == [0, 0]


@pytest.mark.exhaustive
def test_more_weights_stay_under_larger_budgets_and_results_are_the_same():
    assert forks.run(check_budgets, ranks=2, timeout_s=300) == [0, 0]


def check_slow(kind):
    with gathers_of_seconds(10.0):
        check_peaks(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(Gpt, marks=pytest.mark.exhaustive), Mlp])
def test_predicted_peaks_are_the_measured_ones_where_weights_stay(kind):
    assert forks.run(check_slow, kind, ranks=2, timeout_s=200) == [0, 0]


def check_traces():
    """The step that the choice foresees is the one that is recorded under it."""
    free, kept = (run(kind)[2].true.least for kind in (Mlp, Kept))
    for kind, budget in ((Mlp, HUGE), (Mlp, (3 * free + kept) // 4), (Gpt, HUGE)):
        with proposals() as asked, gathers_of_seconds(1e-9):
            found = run(kind, budget)[3].trace
        ((account, gathers, proposed),) = asked
        again = {gather.unit for gather in gathers_of(found)}
        assert proposed.units
        assert again == {gather.unit for gather in gathers} - set(proposed.units)
        foreseen = simulate(staying(account.step, [gather for gather in gathers if gather.unit not in again]))
        assert (foreseen.peak_bytes, foreseen.forward_peak_bytes) == peaks_of(found)
        assert foreseen.peak_bytes > simulate(account.step).peak_bytes or budget < HUGE


def peaks_of(trace):
    found = simulate(trace)
    return found.peak_bytes, found.forward_peak_bytes


@pytest.mark.slow
def test_the_step_with_weights_that_stay_is_foreseen_to_the_byte():
    assert forks.run(check_traces, ranks=2, timeout_s=200) == [0, 0]


def check_uneven():
    """Rank 0 has few samples and could keep all; rank 1 has many."""
    batch_size = (64, 512)[parts.rank()]
    loader = DataLoader(TensorDataset(*Mlp().data()[0][: 5 * batch_size]), batch_size)
    free, kept = (run(kind)[2].true.least for kind in (Mlp, Kept))
    with proposals() as found:
        options = {"data": (loader, None), "use_distributed_sampler": False}
        ours = check_same(Mlp, (3 * free + kept) // 4, 1e-9, **options)
    few, many = map(set, on_all_ranks(found[-1][-1].units))
    assert many < few == set(ALL)
    assert set(ours.run.memory.units.key) == many


@pytest.mark.slow
def test_ranks_with_other_batches_agree_on_what_all_of_them_propose():
    assert forks.run(check_uneven, ranks=2, timeout_s=200) == [0, 0]


def check_validated():
    """A validation leaves weights gathered that stay: the next step is that of its plan all the same."""
    data, batch_size = Mlp().data()
    loaders = DataLoader(data, batch_size), DataLoader(data, batch_size)
    free = run(Mlp)[2].true.least
    with patch.object(Mlp, "validation_step", lambda self, batch, _: self(batch[0]), create=True):
        options = {"data": loaders, "max_steps": 12, "val_check_interval": 3, "limit_val_batches": 1}
        ours = check_same(Mlp, int(0.8 * free), 10.0, **options)
    assert ours.run.memory.units.key
    assert not ours.run.memory.session.plan.keeps_all


@pytest.mark.slow
def test_a_validation_between_two_steps_changes_none():
    assert forks.run(check_validated, ranks=2, timeout_s=200) == [0, 0]


def check_odd():
    ours = check_same(Odd, HUGE, 1.0)
    assert ours.run.memory.units.key == ("blocks.2", "blocks.3")  # its user keeps the first; the choice the second
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    fully_shard([module[0], module[1]], mesh=mesh)
    fully_shard(module[2], mesh=mesh)
    assert list(settle_units(module)) == ["2"]


@pytest.mark.slow
def test_units_of_which_nothing_is_proved_keep_their_setting():
    assert forks.run(check_odd, ranks=2, timeout_s=200) == [0, 0]
