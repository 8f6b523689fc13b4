"""Seconds for fake recordings: what a real step has told is not measured again, what is new is measured once."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose, record
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds, benchmark


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5))


def step(net, x):
    return net(x).square().mean()


def learnt(net, x, **options):
    real = record(lambda: step(net, x))
    net.zero_grad()
    calls = CallSeconds()
    assert calls.learn(lambda: record_fake(net, x, step, device=calls), real, **options)
    return calls, real


def test_a_step_that_was_learnt_is_predicted_without_a_measurement():
    net, x = network(), torch.randn(4, 3, 8, 8)
    calls, real = learnt(net, x)
    again = record_fake(net, x, step, device=calls)
    assert calls.n_measured == 0
    assert [op.name for op in again.ops] == [op.name for op in real.ops]
    slowest = max(range(len(real.ops)), key=lambda index: real.ops[index].seconds)
    assert again.ops[slowest].seconds == real.ops[slowest].seconds


def test_what_the_ops_do_not_take_is_spread_over_them():
    net, x = network(), torch.randn(4, 3, 8, 8)
    calls, _ = learnt(net, x, step_s=100.0)
    assert record_fake(net, x, step, device=calls).seconds == pytest.approx(100.0)


def test_only_the_calls_of_changed_layers_are_measured_and_each_once():
    net, x = network(), torch.randn(4, 3, 8, 8)
    calls, _ = learnt(net, x)
    small = copy.deepcopy(net)
    decompose(small, rank=4, method="svd", select="4", progress=False)
    first = record_fake(small, x, step, device=calls)
    measured = calls.n_measured
    assert 0 < measured < 12
    second = record_fake(small, x, step, device=calls)
    assert calls.n_measured == measured
    assert first.seconds == second.seconds


def test_a_step_with_other_ops_teaches_nothing():
    net, x = network(), torch.randn(4, 3, 8, 8)
    real = record(lambda: step(net, x))
    calls = CallSeconds()
    other = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5))
    assert not calls.learn(lambda: record_fake(other, x, step, device=calls), real)
    assert record_fake(net, x, step, device=calls).seconds > 0
    assert calls.n_measured > 0


def test_a_step_whose_kernels_make_more_than_fake_ones_teaches_nothing():
    """As an LSTM's, whose workspace is empty on fake tensors: prices would leave these bytes out."""
    net, x = network(), torch.randn(4, 3, 8, 8)
    real, calls = record(lambda: step(net, x)), CallSeconds()
    made = next(i for i, storage in enumerate(real.storages) if storage.born >= 0)
    larger = replace(real.storages[made], n_bytes=real.storages[made].n_bytes + 64)
    more = replace(real, storages=(*real.storages[:made], larger, *real.storages[made + 1 :]))
    assert not calls.learn(lambda: record_fake(net, x, step, device=calls), more)
    assert calls.learn(lambda: record_fake(net, x, step, device=calls), real)


def test_a_kernel_that_reads_anothers_workspace_is_not_run_on_noise():
    """The backward of an LSTM writes where its workspace says: on noise it ended the process."""
    net, x = nn.LSTM(16, 128, 2, batch_first=True), torch.randn(64, 16, 16)
    fake = record_fake(net, x, lambda net, x: net(x)[0].square().mean(), device=CallSeconds())
    assert all(op.seconds > 0 for op in fake.ops if "mkldnn_rnn" in op.name)


def test_neither_random_state_nor_arguments_are_touched():
    before = torch.get_rng_state()
    expanded, index = torch.zeros(1, 3).expand(4, 3), torch.tensor([7, 9])
    table = torch.zeros(10, 3)
    assert benchmark(torch.ops.aten.add_.Tensor, (torch.zeros(4, 3), expanded), {}) > 0
    assert benchmark(torch.ops.aten.embedding.default, (table, index), {}) > 0
    assert benchmark(torch.ops.aten.mm.default, (torch.zeros(0, 3), torch.zeros(3, 2)), {}) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(index, torch.tensor([7, 9]))
