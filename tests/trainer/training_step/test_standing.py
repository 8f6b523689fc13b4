"""What stands from step to step is looked through once, and each change between two steps is noticed."""

import gc
import weakref
from collections import deque

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from ctdr_lightning.trainer.training_step.retry import standing as module_under_test
from ctdr_lightning.trainer.training_step.retry.reachable import mark, reachable
from ctdr_lightning.trainer.training_step.retry.snapshot import OPTIMIZERS, Snapshot
from ctdr_lightning.trainer.training_step.retry.standing import KEPT_AT_MOST_BYTES, Standing

PAIR = (torch.ones(1), 0.9)


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1


class Plain:
    def __init__(self):
        self.inner = {"a": 1}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))])
        self.register_buffer("seen", torch.zeros(3))
        self.count, self.words, self.more = 0, ["a", "b"], []
        self.table, self.last = {"x": 1, "y": self.words}, None
        self.names, self.queue = {"p"}, deque([1, 2])
        self.slotted, self.plain = Slotted(), Plain()


def made():
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    return net, {"module": net, OPTIMIZERS: [optimizer]}


@pytest.fixture
def walks(monkeypatch):
    found = []
    monkeypatch.setattr(module_under_test, "reachable", lambda roots: found.append(reachable(roots)) or found[-1])
    return found


def as_facts(found):
    """What a walk found, to be compared: tensors with their ways, and what each container holds."""
    contents = {
        id(thing): [(id(k), id(v)) for k, v in copy.items()] if isinstance(copy, dict) else list(map(id, copy))
        for thing, copy in found.containers
    }
    sets = [sorted(copy) for thing, copy in found.containers if isinstance(thing, set)]
    slots = [(id(thing), {n: id(v) for n, v in held.items()}) for thing, held in found.slots]
    return [(mark(trail), id(t)) for trail, t in found.tensors], contents, sets, slots


def step(net, roots):
    net.net(torch.randn(5, 4)).square().mean().backward()
    roots[OPTIMIZERS][0].step()


def set_(thing, name, value):
    setattr(thing, name, value)


CHANGES = {
    "nothing": lambda net, roots: None,
    "a number": lambda net, roots: set_(net, "count", net.count + 1),
    "a text in a list": lambda net, roots: net.words.__setitem__(0, "c"),
    "a new attribute": lambda net, roots: set_(net, "other", torch.ones(2)),
    "an attribute less": lambda net, roots: delattr(net, "last"),
    "an attribute of another name": lambda net, roots: (delattr(net, "plain"), set_(net, "last_one", Plain())),
    "a key of another name": lambda net, roots: net.table.__setitem__("z", net.table.pop("y")),
    "from one list to the next": lambda net, roots: net.more.append(net.words.pop()),
    "a set": lambda net, roots: net.names.add("q"),
    "a deque": lambda net, roots: net.queue.append(torch.ones(1)),
    "a slot": lambda net, roots: set_(net.slotted, "value", torch.ones(1)),
    "an object's own": lambda net, roots: net.plain.inner.__setitem__("a", torch.ones(1)),
    "a number in an object": lambda net, roots: net.plain.inner.__setitem__("a", 2),
    "another buffer": lambda net, roots: set_(net, "seen", torch.ones(3)),
    "another module": lambda net, roots: net.net.__setitem__(0, nn.Linear(4, 4)),
    "the optimizer's state": step,
    "a learning rate": lambda net, roots: roots[OPTIMIZERS][0].param_groups[0].__setitem__("lr", 0.5),
    "a tensor in a pair": lambda net, roots: roots[OPTIMIZERS][0].param_groups[0].__setitem__("betas", PAIR),
    "one more optimizer": lambda net, roots: roots[OPTIMIZERS].append(torch.optim.SGD(net.parameters(), 0.1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_between_two_steps_is_noticed(name):
    net, roots = made()
    standing = Standing()
    standing.reach(roots)
    assert as_facts(standing.reach(roots)) == as_facts(reachable(roots))
    CHANGES[name](net, roots)
    for _ in range(2):
        assert as_facts(standing.reach(roots)) == as_facts(reachable(roots))


def test_steps_that_change_numbers_alone_are_looked_through_once(walks):
    net, roots = made()
    step(net, roots)
    standing = Standing()
    for _ in range(5):
        standing.reach(roots)
        step(net, roots)
        net.count += 1
        group = roots[OPTIMIZERS][0].param_groups[0]
        group["lr"] *= 0.5
        group["betas"] = (group["betas"][0] * 0.9, 0.999)
    assert len(walks) == 1


def test_a_module_with_a_metric_is_looked_through_once(walks):
    net, roots = made()
    net.metric = MeanMetric()
    standing = Standing()
    for _ in range(3):
        Snapshot(roots, set(), standing)
        standing.release()
    assert len(walks) == 1


def test_a_snapshot_of_a_later_step_puts_back_what_stood_before_that_step():
    net, roots = made()
    standing, written = Standing(), set()
    for _ in range(3):
        net.count += 1
        step(net, roots)
        before = {name: tensor.clone() for name, tensor in net.named_buffers()}
        count, words = net.count, list(net.words)
        snapshot = Snapshot({"batch": torch.ones(2), **roots}, written, standing)
        net.net(torch.randn(5, 4)).sum().backward()
        net.count, net.words = 100, ["z"]
        assert any(not torch.equal(tensor, before[name]) for name, tensor in net.named_buffers())
        snapshot.put_back()
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.named_buffers())
        assert (net.count, net.words) == (count, words)
        standing.release()


def test_buffers_are_copied_by_one_launch_a_dtype_into_memory_that_stands(monkeypatch):
    launches = []
    plain = module_under_test.foreach_copy_
    monkeypatch.setattr(module_under_test, "foreach_copy_", lambda a, b: launches.append(len(a)) or plain(a, b))
    _, roots = made()
    standing = Standing()
    places = set()
    for _ in range(3):
        places.add(tuple(copy.data_ptr() for copy in Snapshot(roots, set(), standing).copies))
        standing.release()
    assert sorted(launches) == [4, 4, 4, 9, 9, 9]  # counts of batches; means, variances and what was seen
    assert len(places) == 1


def test_a_buffer_of_another_shape_or_dtype_gets_a_copy_of_its_own():
    net, roots = made()
    standing = Standing()
    for data in (torch.ones(3), torch.ones(5), torch.ones(5, dtype=torch.float64)):
        net.seen.data = data
        snapshot = Snapshot(roots, set(), standing)
        want = net.seen.clone()
        net.seen.zero_()
        snapshot.put_back()
        assert net.seen.dtype == want.dtype
        assert torch.equal(net.seen, want)


def test_a_buffer_behind_which_another_storage_is_put_is_copied_from_there():
    net, roots = made()
    standing = Standing()
    Snapshot(roots, set(), standing)
    net.seen.data = torch.full((3,), 5.0)
    snapshot = Snapshot(roots, set(), standing)
    net.seen.zero_()
    snapshot.put_back()
    assert net.seen.tolist() == [5.0] * 3


def test_another_tensor_in_the_place_of_a_buffer_is_copied():
    """Python gives the place of an object that is gone to the next one."""
    net, roots = made()
    standing = Standing()
    for i in range(20):
        Snapshot(roots, set(), standing)
        net._buffers["seen"] = None
        net.seen = torch.full((3,), float(i))
        snapshot = Snapshot(roots, set(), standing)
        net.seen.zero_()
        snapshot.put_back()
        assert net.seen.tolist() == [float(i)] * 3


def test_each_batch_is_copied_for_its_own_step():
    _, roots = made()
    standing = Standing()
    for i in range(3):
        batch = torch.full((2,), float(i))
        snapshot = Snapshot({"batch": batch, **roots}, set(), standing)
        batch.zero_()
        snapshot.put_back()
        assert batch.tolist() == [float(i)] * 2
        assert len(snapshot.copies) == 14


def test_a_weight_that_trains_no_more_is_copied():
    net, roots = made()
    standing, weight = Standing(), net.net[0].weight
    assert not any(copied is weight for copied in Snapshot(roots, set(), standing).copied)
    weight.requires_grad_(False)
    assert any(copied is weight for copied in Snapshot(roots, set(), standing).copied)


def emptied(net):
    """As FSDP leaves gathered weights, whose storage it fills again."""
    found = torch.ones(1000)
    found.untyped_storage().resize_(0)
    return found


LET_GO = {
    "large": lambda net: torch.ones(1000),
    "a part of something large": lambda net: torch.ones(1000)[:2],
    "with a graph": lambda net: net.net[0](torch.ones(2, 4)).sum(),
    "emptied": emptied,
}


@pytest.mark.parametrize("make", LET_GO.values(), ids=LET_GO)
def test_what_the_user_lets_go_of_between_steps_is_freed(make):
    net, roots = made()
    net.last = make(net)
    kept, standing = weakref.ref(net.last), Standing()
    Snapshot(roots, set(), standing)
    standing.release()
    net.last = None
    gc.collect()
    assert kept() is None


def test_large_copies_do_not_stand_between_steps():
    net, roots = made()
    for i in range(KEPT_AT_MOST_BYTES // 2**17 + 1):
        net.register_buffer(f"table{i}", torch.zeros(2**15))
    standing = Standing()
    freed = weakref.ref(Snapshot(roots, set(), standing).copies[-1])
    assert freed() is not None
    standing.release()
    assert freed() is None
