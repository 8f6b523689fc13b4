"""An optimizer whose state waits elsewhere: the same weights to the bit, and less memory."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.holders import HolderOptions, Holders
from ctdr_lightning.memory.holders.optimizer_state import StateAway, chunks_of, state_away_of
from ctdr_lightning.memory.values.live_bytes import PeakMeter

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam for-each": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=1e-2),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "lr": 1e-3}], lr=1e-2),
}
CHUNK = 3000


@pytest.fixture
def disk(tmp_path):
    holders = Holders(HolderOptions(folder=tmp_path))
    yield holders["disk"]
    holders.close()


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 24), nn.Linear(24, 24))
    layers[0].to(memory_format=torch.channels_last)
    layers[4].weight.requires_grad_(False)  # a frozen one
    return layers


def steps(module, optimizer, n, closure=False):
    for i in range(n):
        torch.manual_seed(100 + i)
        x = torch.randn(4, 3, 8, 8)

        def loss(x=x):
            optimizer.zero_grad()
            value = module(x).square().mean()
            value.backward()
            return value

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def same_state(a, b):
    one, other = a.state_dict(), b.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, state in one["state"].items():
        assert list(state) == list(other["state"][index])
        for name, item in state.items():
            found = other["state"][index][name]
            assert torch.equal(item, found) if torch.is_tensor(item) else item == found
    return True


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_those_of_a_plain_run_to_the_bit(name, closure, disk):
    plain, moved = net(), net()
    usual, away = (OPTIMIZERS[name](list(m.parameters())) for m in (plain, moved))
    steps(plain, usual, 2, closure)
    steps(moved, away, 2, closure)
    keeper = StateAway(away, disk, CHUNK)  # in mid-run
    steps(plain, usual, 3, closure)
    steps(moved, away, 3, closure)
    assert same(plain, moved)
    assert same_state(usual, away)
    assert (keeper.moved_bytes > 0) == (name != "sgd without state")
    keeper.release()
    assert same_state(usual, away)
    assert "step" not in vars(away)
    steps(plain, usual, 1, closure)
    steps(moved, away, 1, closure)
    assert same(plain, moved)


def test_a_state_dict_is_loaded_into_it_and_out_of_it(disk):
    plain, moved = net(), net()
    usual, away = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, moved))
    steps(plain, usual, 3)
    StateAway(away, disk, CHUNK)
    away.load_state_dict(copy.deepcopy(usual.state_dict()))
    moved.load_state_dict(plain.state_dict())
    steps(plain, usual, 2)
    steps(moved, away, 2)
    assert same(plain, moved)
    fresh = torch.optim.Adam(moved.parameters(), lr=1e-2)
    fresh.load_state_dict(away.state_dict())
    assert same_state(usual, fresh)


def test_hooks_run_once_a_step_and_see_all_parameters(disk):
    module = net()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(("before", len(o.param_groups[0]["params"]))))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(("after", len(o.param_groups[0]["params"]))))
    StateAway(optimizer, disk, CHUNK)
    assert len(list(chunks_of(optimizer, CHUNK))) > 2
    steps(module, optimizer, 1)
    assert seen == [("before", 6), ("after", 6)]


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_goes_on_without_a_warning(scheduler_first, disk, recwarn):
    plain, moved = net(), net()
    pairs = []
    for module, moves in ((plain, False), (moved, True)):
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduler_first else None
        if moves:
            StateAway(optimizer, disk, CHUNK)
        pairs.append((module, optimizer, scheduler or lr_scheduler.ExponentialLR(optimizer, 0.5)))
    for module, optimizer, scheduler in pairs:
        for _ in range(3):
            steps(module, optimizer, 1)
            scheduler.step()
    assert same(plain, moved)
    assert pairs[0][1].param_groups[0]["lr"] == pairs[1][1].param_groups[0]["lr"] == 1e-2 / 8
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_two_chunks_of_state_are_there_at_once_and_no_more(disk):
    wide = nn.ParameterList(nn.Parameter(torch.randn(64, 256)) for _ in range(12))  # 64 KiB each, 128 KiB of state
    optimizer = torch.optim.Adam(wide, lr=1e-2, foreach=False)
    for p in wide:
        p.grad = torch.randn_like(p)
    optimizer.step()
    keeper = StateAway(optimizer, disk, 64 * 1024)
    with PeakMeter() as meter:
        optimizer.step()
    assert keeper.moved_bytes == 12 * 128 * 1024
    assert meter.live.peak <= (2 * 128 + 3 * 64 + 4) * 1024  # two chunks, and Adam's temporaries of one parameter


def test_a_failed_step_leaves_the_groups_whole(disk):
    module = net()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    StateAway(optimizer, disk, CHUNK)
    steps(module, optimizer, 1)
    module[3].weight.grad = torch.full_like(module[3].weight, 0.1).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 6


class Own(torch.optim.Optimizer):
    def step(self, closure=None):
        pass


Own.__module__ = "somewhere.else"


@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p), lambda p: Own(p, {})])
def test_what_is_not_known_to_update_by_parameter_is_refused(make, disk):
    optimizer = make(list(net().parameters()))
    with pytest.raises(ConfigError, match="HINT: Use an optimizer of torch"):
        StateAway(optimizer, disk)
    assert state_away_of(optimizer) is None


def test_the_state_of_a_chunk_is_one_parcel(disk):
    """A transfer of its own for each tensor would cost 11 us of Python and the calls of its events, each way."""

    class Counting:
        def __init__(self, holder):
            self.holder, self.n_puts = holder, 0
            self.device_bytes = holder.device_bytes

        def put(self, tensors):
            self.n_puts += 1
            return self.holder.put(tensors)

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(48)])
    optimizer = torch.optim.AdamW(net.parameters())
    holder = Counting(disk)
    away = StateAway(optimizer, holder)
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    n_chunks = len(list(away.chunks()))
    assert n_chunks < len(list(net.parameters())) / 2
    assert holder.n_puts == n_chunks
    optimizer.step()
    assert holder.n_puts == 2 * n_chunks
    assert away.moved_bytes == sum(2 * layer.weight.nbytes for layer in net)
    away.release()
