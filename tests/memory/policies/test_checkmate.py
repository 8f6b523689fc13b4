"""The mixed integer program on traces: near the bound, within the budget, or a typed error."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, plan, record, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, lower_bound_seconds
from tests.memory.graphs import GRAPHS, graph_trace

QUICK = 3.0


def shared_budget(trace, share):
    resident, peak = trace.resident_bytes, simulate(trace).peak_bytes
    return int(resident + share * (peak - resident))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


@pytest.fixture(scope="module")
def net_trace():
    """Five residual blocks, with seconds as their sizes say, so that the test does not depend on the machine."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Residual(8) for _ in range(5)), nn.Flatten(1))
    images = torch.randn(2, 3, 16, 16)
    trace = record(lambda: net(images).sum())
    return trace.with_costs([1e-3 if "conv" in op.name else 1e-4 for op in trace.ops], {})


@pytest.mark.parametrize(("share", "gap"), [(0.9, 0.01), (0.75, 0.02), (0.6, 0.1)])
def test_plans_of_a_net_are_close_to_the_bound(net_trace, share, gap):
    budget = shared_budget(net_trace, share)
    found = simulate(net_trace, POLICIES["checkmate"](net_trace, Budget(peak_bytes=budget, time_limit_s=20)).actions)
    assert found.peak_bytes <= budget
    assert found.seconds <= (1 + gap) * lower_bound_seconds(net_trace, budget)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_budget_is_kept_or_refused(name):
    trace = graph_trace(GRAPHS[name])
    for share in (1.0, 0.8, 0.6, 0.1):
        budget = Budget(peak_bytes=shared_budget(trace, share), time_limit_s=QUICK)
        try:
            actions = POLICIES["checkmate"](trace, budget).actions
        except InfeasibleBudgetError as error:
            assert share < 1.0
            least = error.least_peak_bytes
        else:
            least = simulate(trace, actions).peak_bytes
            assert least <= budget.peak_bytes
        assert least >= floor_bytes(trace)


def test_it_is_no_slower_than_the_best_checkpoint_subset():
    trace = graph_trace(GRAPHS["residual"])
    budget = Budget(peak_bytes=shared_budget(trace, 0.6), time_limit_s=20)
    ours, theirs = (POLICIES[policy](trace, budget) for policy in ("checkmate", "optimal_fast"))
    assert ours.seconds <= theirs.seconds


def test_without_a_limit_everything_is_kept():
    assert POLICIES["checkmate"](graph_trace(GRAPHS["vgg"]), Budget()).actions == {}


def test_seconds_limit_gives_a_low_peak_within_it():
    trace = graph_trace(GRAPHS["uniform chain"])
    limit = 1.1 * trace.seconds
    found = simulate(trace, POLICIES["checkmate"](trace, Budget(seconds=limit, time_limit_s=12)).actions)
    assert found.seconds <= limit
    assert found.peak_bytes < 0.8 * simulate(trace).peak_bytes


def test_the_plan_tells_its_gap(net_trace):
    made = plan(net_trace, Budget(peak_bytes=shared_budget(net_trace, 0.75), time_limit_s=20), "checkmate")
    assert 0 <= made.gap + 1e-9 < 0.03
    assert "slower than the fastest possible plan" in made.explain()
