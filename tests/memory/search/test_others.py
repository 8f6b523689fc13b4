"""Codecs as moves of the search: what they do is what the simulator says, and each value is judged by itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, RECOMPUTE, Prepared, Simulator, plan, record, simulate
from ctdr_lightning.memory.search.fastest import Fastest
from ctdr_lightning.memory.search.frontier import CHOICES
from ctdr_lightning.memory.search.local_search import LocalSearch
from ctdr_lightning.memory.search.moves import Moves
from ctdr_lightning.memory.search.others import codecs_may_pay, free_codecs, others_of
from ctdr_lightning.memory.simulator.actions import Compress
from ctdr_lightning.memory.traces.machine import CodecCost

MASK = Compress(("mask",))


@pytest.fixture(scope="module")
def bare():
    """A step with dropout masks, which never run again; each op takes a millisecond."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    net, inputs = nn.Sequential(*layers), torch.randn(256, 64)
    trace = record(lambda: net(inputs).sum())
    return trace.with_costs([1e-3] * len(trace.ops), {})


def with_codec(trace, call_s=0.0):
    return trace.with_machine(codecs=[CodecCost("mask", True, "two_valued", 1.0, encode_call_s=call_s)])


def test_a_move_to_a_codec_does_what_it_tells(bare):
    trace = with_codec(bare, 2e-3)
    masks = free_codecs(trace)
    moves = Moves(Simulator(trace), others_of(Prepared(trace), trace.codecs))
    assert list(masks.values()) == [MASK] * 4
    assert not trace.droppable.intersection(masks)
    everywhere, before = moves.simulator.bytes_at() >= 0, moves.simulator.bytes_at().sum()
    for item, value in enumerate(moves.items):
        move = moves.n_choices * item + len(CHOICES)
        assert moves.usable[move] == (value in masks)
        assert [moves.allows(item, choice) for choice in (1, 2)] == [value not in masks] * 2
        if value in masks:
            changed = Simulator(trace, {value: MASK})
            assert changed.bytes_at().sum() - before == moves.weigh(everywhere)[move] < 0
            assert changed.seconds - trace.seconds == pytest.approx(moves.seconds[move]) == pytest.approx(2e-3)


def test_a_plan_with_codecs_goes_in_and_comes_out(bare):
    trace = with_codec(bare)
    masks = free_codecs(trace)
    search = LocalSearch(trace, others=others_of(Prepared(trace), trace.codecs))
    actions = {min(masks): MASK, trace.saved[0]: RECOMPUTE}
    moves = Moves(Simulator(trace), others_of(Prepared(trace), trace.codecs))
    moves.load(moves.state_of(actions))
    assert moves.simulator.seconds == pytest.approx(simulate(trace, actions).seconds)
    assert moves.make(moves.n_choices * moves.items.index(min(masks)) + CHOICES.index(RECOMPUTE) - 1)
    assert moves.simulator.actions[min(masks)] == CHOICES[0]
    search.polish({}, 1)
    for point in search.frontier:
        assert simulate(trace, search.frontier.actions(point)).peak_bytes == point.peak_bytes
    assert set(masks).issubset(search.frontier.actions(search.frontier.least))


def test_without_codecs_nothing_is_another_choice(bare):
    moves = Moves(Simulator(bare))
    assert moves.n_choices == len(CHOICES)
    assert moves.state_of(dict.fromkeys(bare.saved, MASK)) == moves.default


def limit(trace, share):
    return trace.resident_bytes + int(share * (simulate(trace).peak_bytes - trace.resident_bytes))


def test_auto_gives_codecs_to_single_values_where_they_are_faster(bare):
    budget = limit(bare, 0.75)
    slower, made = plan(bare, budget), plan(with_codec(bare, 1e-4), budget)
    assert made.peak_bytes <= budget
    assert made.seconds < slower.seconds
    assert 0 < len(made.away) < 4  # no more than it takes


def test_codecs_are_looked_at_where_one_takes_less_time_a_byte_than_what_is_recomputed(bare):
    """What takes a millisecond to compute again is 64 KiB; a mask of 64 KiB leaves 2 KiB."""
    made = next(v for v in bare.saved if bare.ops[bare.values[v].op].name.startswith("aten.addmm"))
    assert bare.value_bytes(made) == 2**16
    for call_s, pays in ((0.9e-3, True), (1.1e-3, False)):
        trace = with_codec(bare, call_s)
        assert codecs_may_pay(Prepared(trace), {made: RECOMPUTE}, free_codecs(trace)) == pays
        assert not codecs_may_pay(Prepared(trace), {}, free_codecs(trace)), "nothing is recomputed"


@pytest.mark.slow
def test_codecs_that_nobody_asked_for_make_steps_faster_and_no_budget_fit(bare):
    asked = with_codec(bare, 1e-4)
    default = asked.with_machine(codecs=[replace(cost, only_faster=True) for cost in asked.codecs])
    assert plan(default, limit(bare, 0.75)).seconds == plan(asked, limit(bare, 0.75)).seconds
    with pytest.raises(InfeasibleBudgetError) as error:
        plan(bare, 1)
    below = error.value.least_peak_bytes - 1
    assert plan(asked, below).away
    with pytest.raises(InfeasibleBudgetError) as found:
        plan(default, below)
    assert found.value.least_peak_bytes == error.value.least_peak_bytes
    assert POLICIES["gist"].works_on(asked)
    assert not POLICIES["gist"].works_on(default), "its plans have nothing but codecs"


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_auto_is_never_slower_with_codecs_than_without(bare, share):
    budget = limit(bare, share)
    slower, made = plan(bare, budget), plan(with_codec(bare, 1.0), budget)
    assert not made.away
    assert made.seconds <= slower.seconds


def test_auto_fits_with_codecs_where_nothing_else_does(bare):
    least = Fastest(Prepared(bare), LocalSearch(bare), 1).run().peak_bytes
    made = plan(with_codec(bare, 1e-3), least - 2**13)
    assert made.away
    assert made.peak_bytes <= least - 2**13
    assert made.exact
