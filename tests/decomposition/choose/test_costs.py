"""The memory truth against what autograd really saves, and the gates."""

import itertools
import math

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition import METHODS
from ctdr_lightning.decomposition.choose import costs
from ctdr_lightning.decomposition.choose.costs import OPTIMIZER_STATES, CostModel, predicted_seconds, weigh
from ctdr_lightning.decomposition.choose.observe import with_given_shapes, with_shapes
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.decomposition.layers.surgery import factorize
from tests.decomposition.cases import geometry_of, layer_and_input


def saved_bytes(module, x):
    """Bytes of the distinct activations that a forward saves: weights and the input left out."""
    storages = {}

    def note(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        kept.append(t)
        return t

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = module(x)
    for t in (*module.parameters(), x, y):
        storages.pop(t.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *itertools.product(
            ("tucker", "cp", "cp4", "tt", "spatial", "svd"),
            ("conv2d groups=1", "conv_transpose2d groups=2", "conv3d groups=1"),
        ),
        ("svd", "linear"),
        ("tt_linear", "linear"),
    ],
)
def test_activations_added_are_those_autograd_saves(method, name):
    layer, x = layer_and_input(name)
    model = nn.Sequential(layer)
    found = with_shapes(model, find_layers(model), x)[0]
    geometry = geometry_of(layer)
    candidate = METHODS[method].at(geometry, METHODS[method].uniform(geometry, 2))
    new = factorize(layer, geometry, method, candidate.ranks)
    added = weigh(found, candidate, CostModel()).activations_added_bytes
    assert added == saved_bytes(new, x.requires_grad_()) - saved_bytes(layer, x)


@pytest.mark.parametrize("optimizer", OPTIMIZER_STATES)
def test_state_saved_is_what_the_optimizer_holds(optimizer):
    make = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "rmsprop": lambda p: torch.optim.RMSprop(p),
        "adam": lambda p: torch.optim.Adam(p),
        "adamw": lambda p: torch.optim.AdamW(p),
    }[optimizer]

    def held(layer):
        optim = make(layer.parameters())
        layer(torch.randn(2, 32)).sum().backward()
        optim.step()
        tensors = [t for state in optim.state.values() for t in state.values() if t.numel() > 1]
        tensors += [t for p in layer.parameters() for t in (p, p.grad)]
        return sum(t.nbytes for t in tensors)

    layer = nn.Linear(32, 32, bias=False)
    model = nn.Sequential(layer)
    found = with_given_shapes(find_layers(model), {"0": (2, 32)})[0]
    geometry = geometry_of(layer)
    candidate = METHODS["svd"].at(geometry, (4,))
    new = factorize(layer, geometry, "svd", (4,))
    assert weigh(found, candidate, CostModel(optimizer)).state_saved_bytes == held(layer) - held(new)


def net():
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(8), nn.Conv2d(16, 16, 3, padding=1))


def test_early_layers_lose_and_late_ones_win():
    report = decompose(
        net(), rank=0.3, allocate=None, method="tucker", example_input=torch.randn(2, 16, 32, 32), measure=False
    )
    early, late = report.layers
    assert early.decision == "dense"
    assert "would add" in early.reason
    assert late.decision == "factorized"
    assert late.net_bytes < 0
    assert "KiB" in str(report)


def test_recomputed_activations_cost_no_memory():
    x = torch.randn(2, 16, 32, 32)
    report = decompose(net(), rank=0.3, allocate=None, method="tucker", example_input=x, measure=False, recompute=True)
    assert [row.decision for row in report] == ["factorized", "factorized"]


def test_another_method_is_taken_where_the_first_does_not_pay():
    shapes = {"0": (1, 16, 24, 24), "2": (1, 16, 4, 4)}
    report = decompose(net(), rank=0.3, allocate=None, method=["tucker", "svd"], input_shapes=shapes, measure=False)
    assert report.layers[0].method == "svd"
    only = decompose(net(), rank=0.3, allocate=None, method="tucker", input_shapes=shapes, measure=False)
    assert only.layers[0].decision == "dense"


class ReadsTheWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.called, self.read = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return nn.functional.linear(self.called(x), self.read.weight, self.read.bias)


def test_a_layer_whose_forward_is_not_called_stays_dense():
    report = decompose(ReadsTheWeight(), rank=0.3, allocate=None, example_input=torch.randn(8, 32), measure=False)
    by_name = {row.name: row for row in report}
    assert "not called" in by_name["read"].reason
    assert by_name["called"].decision == "factorized"


def test_slower_is_refused_unless_insisted(monkeypatch):
    monkeypatch.setattr(costs, "step_seconds", lambda job: (1.0, 1.2))
    shapes = {"0": (1, 16, 4, 4), "2": (1, 16, 4, 4)}
    report = decompose(net(), rank=0.3, allocate=None, input_shapes=shapes)
    assert all("1.20 times as long" in row.reason for row in report)
    assert len(decompose(net(), rank=0.3, allocate=None, input_shapes=shapes, measure=False).factorized) == 2


def test_predicted_seconds_follow_the_work():
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1))
    small, large = (with_given_shapes(find_layers(model), {"0": (8, 64, n, n)})[0] for n in (16, 32))
    assert predicted_seconds(large, None) > 2 * predicted_seconds(small, None)
    geometry = geometry_of(model[0])
    low = METHODS["tucker"].at(geometry, (4, 4))
    assert predicted_seconds(large, low) < predicted_seconds(large, None)


def test_predicted_seconds_of_a_processor_are_the_same_in_every_run(monkeypatch):
    def measured(_device):
        raise AssertionError("a measured rate is another in the next run")

    monkeypatch.setattr(costs, "model_of", measured)
    (layer,) = with_given_shapes(find_layers(nn.Sequential(nn.Linear(64, 64))), {"0": (8, 64)})
    assert predicted_seconds(layer, None) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": "adma"}, "optimizer"),
        ({"input_shapes": {"nope": (1, 2)}}, "nope"),
        ({"data": []}, "no batch"),
        ({"allocate": "flops", "rank": 0.5}, "example_input"),
        ({"allocate": "money", "rank": 0.5}, "resource 'money'"),
        ({"allocate": "parameters", "rank": 4}, "one share"),
        ({"multiple": 0}, "multiple"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ConfigError, match=words):
        decompose(net(), **arguments)


def test_flops_of_the_report_are_a_samples():
    x = torch.randn(4, 16, 32, 32)
    report = decompose(net(), rank=0.3, allocate=None, example_input=x, measure=False, recompute=True)
    assert report.layers[0].flops_before == 2 * 16 * 16 * 9 * 32 * 32
    assert report.flops_after < report.flops_before
    assert not math.isnan(report.layers[0].relative_error)


def test_a_gpus_products_in_fp32_are_priced_as_torch_runs_them(monkeypatch):
    monkeypatch.setattr(costs, "_PROCESSOR", DEVICES["a100"])
    (linear,) = with_given_shapes(find_layers(nn.Sequential(nn.Linear(4096, 4096))), {"0": (4096, 4096)})
    (conv,) = with_given_shapes(find_layers(nn.Sequential(nn.Conv2d(512, 512, 3, padding=1))), {"0": (64, 512, 28, 28)})
    found = {}
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        found[precision] = predicted_seconds(linear, None), predicted_seconds(conv, None)
    (rounded, conv_s), (exact, same_s) = found["high"], found["highest"]
    assert exact == pytest.approx(90 / 14 * rounded)
    assert conv_s == same_s
