"""Choices are tried on a model that stays dense, and a refit is kept only where the outputs come nearer."""

import copy

import pytest
import torch
from torch import nn

from ctdr_lightning.decomposition.trials import bench as trials
from ctdr_lightning.decomposition.trials.bench import bench_of
from ctdr_lightning.decomposition.trials.refit import refit
from tests.decomposition.cases import decay_


def tried(monkeypatch, act):
    """One trial of a small network whose refit is followed by an act on the refitted layers; the divergence too."""

    def acting(model, layers, record):
        statistics = refit(model, layers, record)
        with torch.no_grad():
            act(layers)
        return statistics

    monkeypatch.setattr(trials, "refit", acting)
    torch.manual_seed(0)
    body = [nn.Linear(16, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 6)]
    model = decay_(nn.Sequential(*body), 0.3).eval()
    batches = [torch.randn(128, 16) for _ in range(4)]
    with bench_of(model, batches, progress=False) as bench:
        start = bench.starts[0]
        found = bench.trial(bench.choices(0.4, start=start), start)
        dense = copy.deepcopy(model)
        bench.adopt(found)
    assert found.layers
    with torch.no_grad():
        return found, model(batches[3]), dense(batches[3])


def spoil(layers):
    for layer in layers.values():
        layer.chain[-1].weight.mul_(-3.0)
        if layer.bias is not None:
            layer.bias.add_(5.0)


def test_a_refit_that_takes_the_outputs_further_away_is_not_kept(monkeypatch):
    spoiled, outputs, dense = tried(monkeypatch, spoil)
    with monkeypatch.context() as inner:
        inner.setattr(trials, "factors_of", lambda _: [])  # nothing is put back
        worse = tried(inner, spoil)[1]
    assert (outputs - dense).square().mean() < 0.2 * (worse - dense).square().mean()
    assert spoiled.divergence == pytest.approx(float((outputs - dense).square().mean() / dense.var() / 2), rel=1e-3)
    assert spoiled.statistics


def test_a_refit_that_brings_the_outputs_nearer_is_kept(monkeypatch):
    kept, outputs, dense = tried(monkeypatch, lambda layers: None)
    spoiled, _, _ = tried(monkeypatch, spoil)
    assert kept.divergence < 0.95 * spoiled.divergence
    assert kept.divergence == pytest.approx(float((outputs - dense).square().mean() / dense.var() / 2), rel=1e-3)


def test_factors_without_a_refit_are_measured_only_where_it_ends_far_from_the_dense_outputs(monkeypatch):
    fitted = []
    monkeypatch.setattr(trials, "_TRUSTED_NATS", 1e9)
    near, _, _ = tried(monkeypatch, lambda layers: fitted.append(sorted(layers)))
    monkeypatch.setattr(trials, "_TRUSTED_NATS", 0.0)
    both, _, _ = tried(monkeypatch, lambda layers: fitted.append(sorted(layers)))
    assert fitted == [sorted(near.layers), sorted(near.layers), []]
    assert both.divergence == near.divergence
