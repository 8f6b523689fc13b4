"""The rules of the tape hold for every plan of small graphs, random plans and policies' plans, and raise the bound."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, RECOMPUTE_EACH, Budget, Prepared, plan, record, simulate
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds, sharp_bound_seconds
from ctdr_lightning.memory.bounds.rounds import MOST_ROUNDS, rounds_of
from ctdr_lightning.memory.bounds.staged_program import StagedProgram, lives_of
from ctdr_lightning.memory.bounds.tape_program import TapeProgram
from tests.memory.bounds.test_lower_bound import every_plan, graphs, random_plan, small_net
from tests.memory.graphs import GRAPHS, chain, graph_trace

TOLERANCE = 1 + 1e-6


def program_of(trace, ticks, peak_bytes, kind=TapeProgram):
    return kind(trace, ticks, peak_bytes, lives_of(trace)).program


def fastest_within(trace):
    """By peak the seconds of the fastest plan that is no higher, by looking at every plan."""
    played = sorted((found.peak_bytes, found.seconds) for found in (simulate(trace, a) for a in every_plan(trace)))
    seconds = itertools.accumulate((s for _, s in played), min)
    return {peak: s for (peak, _), s in zip(played, seconds, strict=True)}


@settings(max_examples=20)
@given(graphs(max_nodes=5), st.integers(0, 2**32))
def test_no_plan_of_a_small_graph_breaks_the_rules(nodes, seed):
    trace, draw = graph_trace(nodes), random.Random(seed)
    fastest, ops = fastest_within(trace), [op.tick for op in trace.ops]
    for peak in draw.sample(sorted(fastest), min(3, len(fastest))):
        for ticks in (ops, sorted(draw.sample(ops, draw.randint(1, len(ops))))):
            found = program_of(trace, ticks, peak).solve(float("inf"))
            assert found is not None
            assert trace.seconds * (1 + found.bound) <= fastest[peak] * TOLERANCE


@settings(max_examples=40)
@given(graphs(max_nodes=14), st.integers(0, 2**32))
def test_no_random_plan_breaks_the_rules(nodes, seed):
    trace, draw = graph_trace(nodes), random.Random(seed)
    made = simulate(trace, random_plan(trace, draw))
    relaxed = program_of(trace, [op.tick for op in trace.ops], made.peak_bytes).relax()
    assert relaxed is not None
    assert trace.seconds * (1 + relaxed.bound) <= made.seconds * TOLERANCE


@pytest.fixture(scope="module")
def real_trace():
    """A net with writes in place, pooling (one op, two saved values), pinned dropout masks and statistics."""
    torch.manual_seed(0)
    net, images = (
        nn.Sequential(small_net()[:4], nn.MaxPool2d(2), *small_net()[1:9], nn.Flatten()),
        torch.randn(4, 3, 8, 8),
    )
    return record(lambda: net(images).sum())


def test_no_random_plan_of_a_real_net_breaks_the_rules(real_trace):
    draw = random.Random(0)
    ops = [op.tick for op in real_trace.ops]
    for _ in range(15):
        made = simulate(real_trace, random_plan(real_trace, draw))
        ticks = sorted(draw.sample(ops, draw.choice((6, 12, 24))))
        relaxed = program_of(real_trace, ticks, made.peak_bytes).relax()
        assert relaxed is not None
        assert real_trace.seconds * (1 + relaxed.bound) <= made.seconds * TOLERANCE


def plans_of_policies(trace, share):
    for policy in POLICIES.values():
        if not policy.clocked and policy.works_on(trace):
            try:
                yield policy(Prepared(trace), Budget(peak_bytes=int(share * simulate(trace).peak_bytes)))
            except InfeasibleBudgetError:
                continue


@pytest.mark.parametrize("name", GRAPHS)
def test_no_policy_beats_the_bound_of_the_rounds(name):
    trace = graph_trace(GRAPHS[name])
    step, fastest = Prepared(trace), dict[int, float]()
    for made in plans_of_policies(trace, 0.6):
        fastest[made.peak_bytes] = min(made.seconds, fastest.get(made.peak_bytes, float("inf")))
    for peak, seconds in fastest.items():
        list(rounds_of(step, peak))
        assert sharp_bound_seconds(step, peak) <= seconds * TOLERANCE


def first_large():
    """A chain whose first values are large: near its least peak they can neither wait nor stay."""
    return graph_trace(chain([16, 16, 16, 2, 2, 2]))


def test_the_rules_prove_the_best_plan_that_the_stages_alone_do_not():
    trace = first_large()
    fastest = fastest_within(trace)
    peak = min(fastest)
    ticks = [op.tick for op in trace.ops]
    without = program_of(trace, ticks, peak, StagedProgram).relax()
    within = program_of(trace, ticks, peak).relax()
    assert within.bound > without.bound + 0.01
    assert trace.seconds * (1 + within.bound) <= fastest[peak] * TOLERANCE


def test_what_does_not_fit_is_forbidden():
    trace = first_large()
    peak = min(fastest_within(trace))
    staged = TapeProgram(trace, [op.tick for op in trace.ops], peak, lives_of(trace))
    solution = staged.program.relax()
    largest = [
        x for (_, v), x in staged.present.items() if trace.value_bytes(v) == 16 and staged.program.is_forbidden(x)
    ]
    assert largest
    assert all(solution.values[x] == 0 for x in largest)


def test_a_value_made_at_each_use_is_said_to_be():
    trace = first_large()
    peak = min(fastest_within(trace))
    staged = TapeProgram(trace, [op.tick for op in trace.ops], peak, lives_of(trace))
    actions = staged.actions_of(staged.program.solve(float("inf")).values, 0.5)
    assert RECOMPUTE_EACH in actions.values()
    made = simulate(trace, actions)
    assert (made.peak_bytes, made.seconds) == (peak, pytest.approx(fastest_within(trace)[peak]))


def step_of_rounds():
    """A step and a peak whose first round breaks the budget."""
    step = Prepared(graph_trace(GRAPHS["vgg"]))
    return step, int(0.7 * step.plain_peak_bytes)


def test_rounds_go_on_until_their_plan_fits():
    step, peak = step_of_rounds()
    rounds = list(rounds_of(step, peak))
    assert 1 < len(rounds) <= MOST_ROUNDS
    assert [made.excess_bytes > 0 for made in rounds] == [True] * (len(rounds) - 1) + [False]
    best = simulate(step, rounds[-1].actions)
    assert best.peak_bytes <= peak
    assert best.seconds == pytest.approx(sharp_bound_seconds(step, peak), rel=1e-5)
    assert sharp_bound_seconds(step, peak) > 1.005 * lower_bound_seconds(step, peak)


def test_rounds_are_made_once_and_keep_no_program():
    step, peak = step_of_rounds()
    first = list(rounds_of(step, peak))
    assert all(a is b for a, b in zip(first, rounds_of(step, peak), strict=True))
    assert rounds_of(step, peak - 1) is not rounds_of(step, peak)
    kept = vars(rounds_of(step, peak)).values()
    assert not any(isinstance(thing, StagedProgram) for thing in kept)


def test_auto_takes_the_rounds_bound_and_plan():
    step, peak = step_of_rounds()
    made = plan(step, peak)
    assert made.bound_seconds == sharp_bound_seconds(step, peak)
    assert made.gap < 1e-5
