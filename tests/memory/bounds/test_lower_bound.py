"""No plan is faster than the bound, no plan is lower than the floor: against every plan, random plans, every policy."""

import itertools
import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import KEEP, POLICIES, RECOMPUTE, RECOMPUTE_EACH, Budget, Prepared, plan, record, simulate
from ctdr_lightning.memory.bounds import lower_bound
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, lower_bound_seconds
from ctdr_lightning.memory.bounds.staged_program import StagedProgram, choose_ticks, lives_of
from tests.memory.graphs import GRAPHS, Node, chain, graph_trace, residual

TOLERANCE = 1 + 1e-9


@st.composite
def graphs(draw, max_nodes=6):
    """A few nodes that read one or two of the nodes before them; the last reads the one before it."""
    nodes = [Node((), draw(st.integers(1, 9)))]
    for index in range(1, draw(st.integers(2, max_nodes))):
        parents = {index - 1, draw(st.integers(0, index - 1))}
        nodes.append(
            Node(
                tuple(sorted(parents)),
                draw(st.integers(1, 9)),
                draw(st.integers(1, 5)) / 2,
                saved=draw(st.booleans()),
                temp_bytes=draw(st.integers(0, 4)),
            )
        )
    return nodes


def every_plan(trace):
    kinds = dict.fromkeys(sorted(trace.droppable), (KEEP, RECOMPUTE, RECOMPUTE_EACH))
    for actions in itertools.product(*kinds.values()):
        yield dict(zip(kinds, actions, strict=True))


def fastest_plans(trace):
    """From each peak that a plan has to the seconds of the fastest with it."""
    fastest = {}
    for actions in every_plan(trace):
        found = simulate(trace, actions)
        fastest[found.peak_bytes] = min(found.seconds, fastest.get(found.peak_bytes, float("inf")))
    return fastest


def random_plan(trace, draw):
    share = draw.random() ** draw.choice((0.3, 1.0))
    kinds = draw.choice(((RECOMPUTE,), (RECOMPUTE, RECOMPUTE_EACH)))
    actions = {v: draw.choice(kinds) for v in trace.saved if draw.random() < share}
    unsaved, more = sorted(trace.droppable - set(trace.saved)), draw.choice((0.0, share / 2, 0.9))
    return actions | {v: draw.choice((KEEP, *kinds)) for v in unsaved if draw.random() < more}


def assert_bounded(trace, actions):
    found = simulate(trace, actions)
    assert found.peak_bytes >= floor_bytes(trace)
    assert lower_bound_seconds(trace, found.peak_bytes) <= found.seconds * TOLERANCE


@settings(max_examples=25)
@given(graphs(max_nodes=5))
def test_no_plan_of_a_small_graph_beats_bound_or_floor(nodes):
    trace = graph_trace(nodes)
    fastest = fastest_plans(trace)
    assert min(fastest) >= floor_bytes(trace)
    for peak_bytes, seconds in fastest.items():
        assert lower_bound_seconds(trace, peak_bytes) <= seconds * TOLERANCE


@settings(max_examples=60)
@given(graphs(max_nodes=14), st.integers(0, 2**32))
def test_no_random_plan_beats_bound_or_floor(nodes, seed):
    trace = graph_trace(nodes)
    assert_bounded(trace, random_plan(trace, random.Random(seed)))


def small_net():
    block = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *block, *block, nn.Flatten(), nn.Linear(8 * 256, 10))


@pytest.fixture(scope="module")
def real_trace():
    """A net with writes in place, pinned dropout masks and statistics."""
    torch.manual_seed(0)
    net, images = small_net(), torch.randn(4, 3, 16, 16)
    return record(lambda: net(images).sum())


@pytest.mark.slow
def test_no_random_plan_of_a_real_net_beats_bound_or_floor(real_trace):
    draw = random.Random(0)
    for _ in range(60):
        assert_bounded(real_trace, random_plan(real_trace, draw))


@cache
def step_of(name):
    """A graph's step, with what all policies make of it."""
    return Prepared(graph_trace(GRAPHS[name]))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound(policy, name):
    step = step_of(name)
    for share in (1.0, 0.7, 0.5):
        try:
            made = plan(step, Budget(peak_bytes=int(share * step.plain_peak_bytes)), policy)
        except InfeasibleBudgetError:
            continue
        assert 0 < made.bound_seconds <= made.seconds * TOLERANCE
        assert made.gap >= -1e-9


@pytest.mark.parametrize("share", [0.85, 0.7])
def test_a_forward_that_breaks_the_budget_by_more_than_the_backward_binds_too(share, monkeypatch):
    trace = graph_trace(chain([4] * 7))
    last = trace.forward_ops[-1]
    trace = trace.with_costs([op.seconds for op in trace.ops], {last: 9})
    monkeypatch.setattr(lower_bound, "MANY_VARIABLES", 0)  # as in a step that is too large for more than one tick
    step = Prepared(trace)
    budget_bytes = int(share * step.plain_peak_bytes)
    bound_s = lower_bound_seconds(step, budget_bytes)
    for peak_bytes, seconds in fastest_plans(trace).items():
        assert lower_bound_seconds(step, peak_bytes) <= seconds * TOLERANCE
    monkeypatch.setattr(lower_bound, "MUCH_HIGHER", float("inf"))
    assert bound_s > lower_bound_seconds(Prepared(trace), budget_bytes) + 0.1


def test_everything_fits_the_plain_peak():
    trace = graph_trace(residual(3))
    assert lower_bound_seconds(trace, simulate(trace).peak_bytes) == trace.seconds


def test_nothing_fits_below_the_floor():
    trace = graph_trace(residual(3))
    assert lower_bound_seconds(trace, floor_bytes(trace) - 1) == float("inf")


def test_bound_rises_as_the_budget_falls():
    trace = graph_trace(residual(6))
    peak, floor = simulate(trace).peak_bytes, floor_bytes(trace)
    found = [lower_bound_seconds(trace, b) for b in range(peak, floor - 1, -16)]
    assert found[0] == trace.seconds
    assert found[-1] > 1.05 * trace.seconds
    assert all(later >= sooner / 1.01 for sooner, later in itertools.pairwise(found))


def test_bound_is_tight_where_one_value_must_go():
    trace = graph_trace(chain([4] * 10))
    drop_one = simulate(trace, {4: RECOMPUTE})
    assert drop_one.peak_bytes < simulate(trace).peak_bytes
    assert lower_bound_seconds(trace, drop_one.peak_bytes) == pytest.approx(drop_one.seconds)


def test_a_byte_too_many_costs_a_whole_value():
    trace = graph_trace(chain([4] * 10))
    peak = simulate(trace).peak_bytes
    fastest = min(simulate(trace, {v: RECOMPUTE}).seconds for v in trace.droppable.intersection(trace.saved))
    assert fastest > trace.seconds
    assert lower_bound_seconds(trace, peak - 1) == pytest.approx(fastest, rel=1e-5)
    staged = StagedProgram(trace, choose_ticks(trace, simulate(trace).bytes_at, peak - 1, 1), peak - 1, lives_of(trace))
    assert trace.seconds * (1 + staged.program.relax().bound) < fastest - 0.5 * (fastest - trace.seconds)


def test_whole_numbers_bound_no_less_than_shares():
    trace = graph_trace(residual(6))
    peak = int(0.55 * simulate(trace).peak_bytes)
    ticks = choose_ticks(trace, simulate(trace).bytes_at, peak, 4)
    program = StagedProgram(trace, ticks, peak, lives_of(trace)).program
    relaxed, found = program.relax(), program.solve(time_limit_s=20)
    assert relaxed is not None
    assert found is not None
    assert 0 < relaxed.bound <= found.bound * TOLERANCE <= found.cost * TOLERANCE**2
