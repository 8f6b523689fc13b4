"""One budget over all layers."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning import decompose
from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose import costs
from ctdr_lightning.decomposition.choose.allocate import RESOURCES, LayerOptions, spend
from ctdr_lightning.decomposition.methods import KeepDenseError
from tests.decomposition.cases import decay_

COSTS = st.lists(st.integers(0, 50), min_size=2, max_size=6, unique=True)


@st.composite
def choices(draw):
    """A few layers whose loss falls as their cost rises."""
    found = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        cost = sorted(draw(COSTS))
        loss = sorted((draw(st.floats(0, 5)) for _ in cost), reverse=True)
        found[name] = LayerOptions(list(range(len(cost))), torch.tensor(cost).double(), torch.tensor(loss).double())
    return found


def brute_force(found, budget):
    best = None
    for rows in itertools.product(*(range(len(o.cost)) for o in found.values())):
        pairs = list(zip(rows, found.values(), strict=True))
        if sum(float(o.cost[row]) for row, o in pairs) <= budget:
            loss = sum(float(o.loss[row]) for row, o in pairs)
            best = loss if best is None else min(best, loss)
    return best


@settings(max_examples=150, derandomize=True)
@given(choices(), st.floats(0, 1))
def test_within_the_budget_and_near_the_best(found, share):
    low, high = (sum(float(f(o.cost)) for o in found.values()) for f in (torch.min, torch.max))
    budget = low + share * (high - low)
    rows = spend(found, budget)
    assert sum(float(found[name].cost[row]) for name, row in rows.items()) <= budget + 1e-9
    loss = sum(float(found[name].loss[row]) for name, row in rows.items())
    gap = max(float((o.loss[:-1] - o.loss[1:]).max()) for o in found.values())
    assert loss <= brute_force(found, budget) + 2 * gap + 1e-9  # what one multiplier may miss: a step a layer


def test_too_small_a_budget_is_said():
    with pytest.raises(KeepDenseError, match="cheapest"):
        spend({"a": LayerOptions([None], torch.tensor([5.0]), torch.tensor([0.0]))}, 4.0)


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        decay_(nn.Conv2d(24, 24, 3, padding=1), 2.5),
        nn.ReLU(),
        decay_(nn.Conv2d(24, 24, 3, padding=1), 0.1),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Linear(24 * 36, 10),
    )


@pytest.fixture
def steady_processor(monkeypatch):
    """A processor with fixed rates: measured on a busy machine, a launch can cost more than half of a small layer."""
    steady = DeviceModel("cpu", 5e10, 2.5e10, 1e10, 1e-6)
    monkeypatch.setattr(costs, "model_of", lambda device: steady)


@pytest.mark.usefixtures("steady_processor")
@pytest.mark.parametrize("resource", RESOURCES)
def test_every_resource_is_kept_to(resource):
    x = torch.randn(4, 24, 40, 40)
    model = net()
    report = decompose(model, rank=0.5, allocate=resource, example_input=x, measure=False, recompute=True)
    assert report.factorized
    if resource == "parameters":
        dense = sum(row.parameters_before for row in report)
        assert sum(row.parameters_after for row in report) <= 0.5 * dense + 100
    if resource == "flops":
        assert report.flops_after <= 0.5 * report.flops_before
    model(x).sum().backward()


def test_spends_where_it_hurts_least():
    uniform, shared = net(), net()
    even = decompose(uniform, rank=0.3, select=["0", "2"], allocate=None).layers
    spread = decompose(shared, rank=0.3, select=["0", "2"], allocate="parameters").layers
    assert sum(row.parameters_after for row in spread) <= sum(row.parameters_before for row in spread) * 0.3 + 60
    assert spread[0].parameters_after < even[0].parameters_after
    kept = [[1 - row.relative_error**2 for row in rows] for rows in (even, spread)]
    assert kept[1][0] * kept[1][1] > kept[0][0] * kept[0][1]


def test_more_budget_never_loses_more():
    kept = []
    for share in (0.1, 0.2, 0.4, 0.8):
        rows = decompose(net(), rank=share, select=["0", "2"], allocate="parameters").layers
        kept.append((1 - rows[0].relative_error ** 2) * (1 - rows[1].relative_error ** 2))
    assert kept == sorted(kept)


def test_no_layer_is_cut_to_nothing():
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(4)))
    rows = decompose(model, rank=0.25, allocate="parameters").layers
    assert max(row.relative_error for row in rows) < 0.97


LARGE = torch.zeros(64, 24, 40, 40)  # at this batch a factor's activations outweigh what it saves


def test_impossible_when_layers_do_not_pay():
    """The linear layer alone pays, and has too few operations for the share."""
    with pytest.raises(ConfigError, match="2 layers stay dense, '0' among them") as caught:
        decompose(net(), rank=0.1, allocate="flops", example_input=LARGE, measure=False)
    assert "recompute=True" in caught.value.hint
    assert decompose(net(), rank=0.1, allocate="flops", example_input=LARGE, measure=False, recompute=True).factorized


def test_a_share_below_the_least_ranks_is_not_blamed_on_activations():
    with pytest.raises(ConfigError, match=r"cannot be met.* Most of it takes '\d' \(") as caught:
        decompose(net(), rank=0.001, allocate="flops", example_input=LARGE, measure=False, recompute=True)
    assert "recompute" not in caught.value.hint


def test_all_is_dense_with_reasons_when_no_layer_pays():
    model = net()
    report = decompose(model, rank=0.1, select=["0", "2"], allocate="flops", example_input=LARGE, measure=False)
    assert not report.factorized
    assert all("saves memory" in row.reason for row in report)
    assert isinstance(model[0], nn.Conv2d)


def test_cp_can_take_part():
    report = decompose(copy.deepcopy(net()), rank=0.3, method=["cp", "tucker"], allocate="parameters", select="[02]")
    assert len(report.factorized) == 2
