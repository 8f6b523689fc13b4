"""What a snapshot before each step costs and says; what it puts back is shown by the retries' tests."""

import gc
import weakref

import pytest
import torch
from torch import nn

from ctdr_lightning.trainer.modules import SMALL_ELEMENTS
from ctdr_lightning.trainer.training_step.retry.reachable import mark, reachable, way
from ctdr_lightning.trainer.training_step.retry.snapshot import OPTIMIZERS, Snapshot


def stepped(net):
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, net.in_features)).sum().backward()
    optimizer.step()
    return optimizer


def test_no_tensor_is_written_out_before_a_step(monkeypatch):
    """An optimizer's state is kept by parameter: its way in words would cost milliseconds a tensor."""
    net = nn.Linear(3, 2)
    roots = {"module": net, OPTIMIZERS: [stepped(net)]}
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor, **_: pytest.fail("a tensor was written out"))
    first = Snapshot(roots, written := set())
    first.learn()
    Snapshot(roots, written)


def test_ways_name_the_parameter_that_a_state_belongs_to():
    net = nn.Linear(3, 2)
    ways = [way(trail) for trail, _ in reachable({OPTIMIZERS: [stepped(net)]}).tensors]
    assert "optimizers[0].state[Parameter of (2, 3)].exp_avg" in ways


def test_marks_tell_tensors_apart_and_are_the_same_in_the_next_step():
    net = nn.Linear(3, 3)
    net.other = nn.Parameter(torch.ones(3, 3))  # of the weight's shape
    net.register_forward_hook(lambda module, args, out: out + module.other.sum())
    optimizer = stepped(net)
    first, second = ([mark(trail) for trail, _ in reachable({OPTIMIZERS: [optimizer]}).tensors] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)


def test_marks_keep_nothing_alive():
    net = nn.Linear(3, 2)
    marks = [mark(trail) for trail, _ in reachable({OPTIMIZERS: [stepped(net)]}).tensors]
    weight = weakref.ref(net.weight)
    del net
    gc.collect()
    assert marks
    assert weight() is None


def test_the_states_of_torchs_generators_count_among_the_copies():
    net = nn.Linear(3, 2)
    state_bytes = torch.get_rng_state().nbytes
    assert Snapshot({"module": net}, set()).copied_bytes == state_bytes
    net.register_buffer("seen", torch.zeros(7))
    net.noise = torch.Generator()
    snapshot = Snapshot({"module": net}, set())
    assert snapshot.copied_bytes == 2 * state_bytes + 28
    assert sum(held.nbytes for held in (*snapshot.copies, *snapshot.states)) == snapshot.copied_bytes


def test_small_attributes_are_copied_unseen_unless_they_are_many():
    """A module may hold its data; what of it a step writes is copied from then on."""
    net = nn.Sequential(nn.BatchNorm1d(3))
    net.seen = [torch.zeros(2**14) for _ in range(16)]  # a MiB
    assert len(Snapshot({"module": net}, set()).copies) == 16 + 3
    net.seen.append(torch.zeros(1))
    first = Snapshot({"module": net}, written := set())
    assert len(first.copies) == 3
    assert len(Snapshot({"module": net}, set(), most_bytes=float("inf")).copies) == 17 + 3
    net.seen[4].add_(1)
    assert "seen[4]" in first.cannot_be_put_back()
    first.learn()
    assert any(copied is net.seen[4] for copied in Snapshot({"module": net}, written).copied)


def test_what_a_step_wrote_is_copied_before_the_next_one():
    net = nn.Linear(1, 1)
    net.seen = torch.zeros(SMALL_ELEMENTS + 1)
    first = Snapshot({"module": net}, written := set())
    assert not any(copied is net.seen for copied in first.copied)
    net.seen.add_(1)
    assert "seen" in first.cannot_be_put_back()
    first.learn()
    second = Snapshot({"module": net}, written)
    assert any(copied is net.seen for copied in second.copied)
    net.seen.add_(1)
    second.put_back()
    assert net.seen.unique().tolist() == [1]
