"""The dense step's time, told from the factorized step's, and the plan of least peak within it."""

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose, record
from ctdr_lightning.joint import promise as promises
from tests.joint import parts


@pytest.fixture(scope="module")
def cut():
    net = parts.network()
    decompose(net, {"3": (16, 16), "11": 4}, progress=False)
    return net, record(lambda: parts.step(net, parts.batches()[0]))


def test_inputs_are_those_of_the_layers_calls(cut):
    net, trace = cut
    assert list(promises.input_shapes(trace, "3", net[3])) == [(16, 32, 12, 12)]
    assert list(promises.input_shapes(trace, "11", net[11])) == [(16, 64)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("dense", "x"),
    [
        (nn.Linear(32, 48), torch.randn(5, 32)),
        (nn.Linear(32, 48, bias=False), torch.randn(2, 7, 32)),
        (nn.Embedding(64, 32), torch.randint(64, (3, 9))),
    ],
    ids=["rows", "sequences", "tokens"],
)
def test_a_layers_own_weight_is_not_its_input(dense, x, frozen):
    net = nn.Sequential(dense)
    decompose(net, 4, progress=False)
    net.requires_grad_(not frozen)
    free = nn.Parameter(torch.zeros(()))
    trace = record(lambda: (net(x) * free).sum() + (net(x) * free).sum())
    rows = x.shape if isinstance(dense, nn.Embedding) else (x.numel() // 32, 32)
    assert list(promises.input_shapes(trace, "0", net[0])) == [rows] * 2


def test_each_layer_counts_by_what_the_dense_one_takes_longer(cut, monkeypatch):
    net, trace = cut
    jobs = []
    monkeypatch.setattr(promises, "step_seconds", lambda job: jobs.append(job.method) or (0.5, 0.2))
    assert promises.dense_step_seconds(trace, net) == pytest.approx(trace.seconds + 2 * 0.3)
    assert jobs == [net[3].method, net[11].method]


def test_the_time_won_is_spent_on_memory(cut, monkeypatch):
    net, trace = cut
    monkeypatch.setattr(promises, "step_seconds", lambda job: (0.2, 0.2))
    held = promises.promise(trace, net)
    monkeypatch.setattr(promises, "step_seconds", lambda job: (0.2 + trace.seconds, 0.2))
    thrifty = promises.promise(trace, net)
    assert held.seconds <= trace.seconds * 1.001
    assert thrifty.seconds <= 3.001 * trace.seconds
    assert thrifty.peak_bytes < held.peak_bytes


def test_a_model_without_factorized_layers_takes_its_own_time():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    trace = record(lambda: net(torch.randn(4, 8)).sum())
    assert promises.dense_step_seconds(trace, net) == trace.seconds
