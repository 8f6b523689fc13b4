"""All factors together, moved towards the dense network's outputs on batches that are not judged by."""

import copy
import math

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.decomposition.trials import refine as refining
from ctdr_lightning.decomposition.trials.bench import bench_of
from tests.decomposition.cases import decay_


def network(kind: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """A network whose weights decay slowly, so that a cut hurts, and batches of one source."""
    torch.manual_seed(0)
    if kind == "layers":
        model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8))
        batches = [torch.randn(64, 24) for _ in range(8)]
    elif kind == "convolutions":
        first, second = nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.Conv2d(24, 24, 3, padding=1, bias=False)
        norms = nn.BatchNorm2d(24), nn.BatchNorm2d(24)
        body = [first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model = nn.Sequential(*body, nn.Linear(24, 6))
        batches = [torch.randn(32, 3, 8, 8) for _ in range(8)]
    else:
        model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        batches = [torch.randn(16, 10, 32) for _ in range(8)]
    decay_(model, 0.3)
    for batch in batches:
        model.train()(batch)
    return model, batches


def distance(model, dense, batches):
    """Squared distance of the outputs on unseen batches."""
    unseen = [torch.randn_like(batch) for batch in batches]
    with torch.no_grad():
        return sum(float((model.eval()(x) - dense.eval()(x)).square().mean()) for x in unseen)


@pytest.mark.parametrize("kind", ["layers", "convolutions", "attention"])
def test_the_outputs_come_nearer_on_batches_that_nobody_saw(kind):
    model, batches = network(kind)
    dense = copy.deepcopy(model)
    with bench_of(model, batches, progress=False) as bench:
        trial = bench.best(0.3)
        plain = copy.deepcopy(trial)
        refined = bench.refined(trial)
        assert refined.divergence < 0.95 * plain.divergence
        bench.adopt(refined)
    other = copy.deepcopy(dense)
    with bench_of(other, batches, progress=False) as bench:
        bench.adopt(bench.best(0.3))
    torch.manual_seed(1)
    before = distance(other, dense, batches)
    torch.manual_seed(1)
    assert distance(model, dense, batches) < before


@pytest.mark.slow
def test_twice_the_same_and_nothing_else_is_moved():
    found = []
    for _ in range(2):
        model, batches = network("convolutions")
        model[3].weight.requires_grad_(False)
        kept = {name: p.detach().clone() for name, p in model.named_parameters() if name in ("1.weight", "4.bias")}
        state, modes = torch.get_rng_state(), [m.training for m in model.modules()][:3]
        decompose(model, 0.3, data=batches, progress=False)
        assert torch.equal(torch.get_rng_state(), state)
        assert [m.training for m in model.modules()][:3] == modes
        assert all(torch.equal(dict(model.named_parameters())[name], p) for name, p in kept.items())
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert {id(p) for p in frozen} == {id(p) for p in model[3].chain.parameters()}
        assert all(p.grad is None for p in model.parameters())
        found.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_wins_nothing_is_put_back(monkeypatch):
    monkeypatch.setattr(refining, "_RATE", 30.0)  # every round is far worse than the start
    model, batches = network("layers")
    with bench_of(model, batches, progress=False) as bench:
        trial = bench.best(0.3)
        before = {name: copy.deepcopy(layer.state_dict()) for name, layer in trial.layers.items()}
        after = bench.refined(trial)
    assert after.divergence == trial.divergence
    for name, layer in after.layers.items():
        assert all(torch.equal(before[name][key], value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("error", [RuntimeError("no backward in evaluation mode"), torch.OutOfMemoryError("full")])
def test_a_step_that_fails_leaves_the_refit(monkeypatch, error):
    def fail(*_):
        raise error

    model, batches = network("layers")
    monkeypatch.setattr(refining, "_gradients", fail)
    report = decompose(model, 0.3, data=batches, progress=False)
    assert report.factorized
    assert math.isfinite(report.divergence)
    assert all(p.requires_grad for p in model.parameters())


def test_one_batch_alone_judges_nothing_so_nothing_is_moved():
    model, batches = network("layers")
    with bench_of(model, batches[:1], progress=False) as bench:
        trial = bench.best(0.3)
        before = {name: copy.deepcopy(layer.state_dict()) for name, layer in trial.layers.items()}
        after = bench.refined(trial)
    for name, layer in after.layers.items():
        assert all(torch.equal(before[name][key], value) for key, value in layer.state_dict().items())


def test_half_precision_is_moved_by_less_than_its_own_spacing():
    model, batches = network("layers")
    model, batches = model.bfloat16(), [batch.bfloat16() for batch in batches]
    with bench_of(model, batches, progress=False) as bench:
        trial = bench.best(0.3)
        before = trial.divergence
        after = bench.refined(trial)
    assert after.divergence < before


def test_steps_are_taken_on_the_batches_beyond_the_first_eight_too(monkeypatch):
    seen = []
    monkeypatch.setattr(refining, "_descend", lambda _model, _found, answers, *_: seen.extend(answers.pairs))
    model, batches = network("layers")
    more = [torch.randn(64, 24) for _ in range(4)]
    decompose(model, 0.3, data=[*batches, *more], n_batches=11, progress=False)
    assert [any(batch is other for batch, _ in seen) for other in more] == [True, True, True, False]
    assert len(seen) == 6 + 3
