"""The dynamic program on plain chains: known results, schedules played step by step, every schedule looked at."""

import heapq
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, simulate
from ctdr_lightning.memory.policies.rotor import ALL, BACKWARD, CHECKPOINT, NONE, ChainLink, actions_of, solve
from ctdr_lightning.memory.search.chain import find_chain
from tests.memory.graphs import GRAPHS, chain, graph_trace

UNIFORM = ChainLink(forward_s=1, backward_s=2, output_bytes=1, saved_bytes=1)


@pytest.mark.parametrize(
    ("n_layers", "times"),
    [
        (8, {8: 1.125, 6: 1.250, 5: 1.417, 4: 2.125}),
        (16, {12: 1.146, 9: 1.229, 7: 1.354}),
        (24, {16: 1.153, 10: 1.264}),
    ],
)
def test_uniform_chain_has_the_published_times(n_layers, times):
    table = solve([UNIFORM] * n_layers, 1, 1, 20)
    for budget, time_ratio in times.items():  # the budget holds the chain's input too
        assert table.seconds[0, -1, budget - 1] / (3 * n_layers) == pytest.approx(time_ratio, abs=5e-4)


class Memory:
    """The paper's rules of memory: what each step takes, given what is held."""

    def __init__(self, links, input_bytes):
        self.links = links
        self.input = [input_bytes, *(link.output_bytes for link in links)]

    def held(self, items):
        return sum(self.links[k].saved_bytes if kind == ALL else self.input[k] for kind, k in items)

    def pass_(self, items, stage, behind, transient):
        passing = self.input[stage] if transient else 0
        return self.held(items) + passing + self._pass(stage, behind)

    def _pass(self, stage, behind):
        return self.input[behind + 1] * (behind > stage) + self.input[stage + 1] + self.links[stage].forward_temp_bytes

    def full(self, items, stage, behind):
        link = self.links[stage]
        own = link.saved_bytes + max(link.forward_temp_bytes, link.backward_temp_bytes)
        first = self._pass(stage, behind) if behind > stage else 0
        return self.held(items) + max(self.input[stage + 1] + own, first)


def played(links, input_bytes, steps):
    """Seconds and peak of a schedule; asserts that every step finds what it needs."""
    memory, items, at, behind, seconds, peak = Memory(links, input_bytes), set(), 0, len(links) - 1, 0.0, 0
    for kind, stage in steps:
        if kind == BACKWARD:
            assert stage == behind
            assert (ALL, stage) in items
            items -= {(ALL, stage), (CHECKPOINT, stage)}
            seconds += links[stage].backward_s
            behind, at = stage - 1, None
            continue
        stored = stage == 0 or (CHECKPOINT, stage) in items or (ALL, stage - 1) in items
        assert stored or at == stage
        if kind != NONE and not stored:
            items.add((CHECKPOINT, stage))
            stored = True
        peak = max(
            peak, memory.full(items, stage, behind) if kind == ALL else memory.pass_(items, stage, behind, not stored)
        )
        if kind == ALL:
            items.add((ALL, stage))
        seconds += links[stage].forward_s
        at = stage + 1
    assert behind == -1
    return seconds, peak


def fastest(links, input_bytes, budget):
    """Time of the fastest persistent schedule, by Dijkstra's algorithm over all states."""
    memory, n = Memory(links, input_bytes), len(links)
    best, count = {}, itertools.count()
    queue = [(0.0, next(count), n - 1, frozenset(), 0)]
    while queue:
        seconds, _, behind, items, at = heapq.heappop(queue)
        if behind < 0:
            return seconds
        if best.get((behind, items, at), float("inf")) <= seconds:
            continue
        best[behind, items, at] = seconds
        for cost, state in _moves(memory, n, behind, items, at, budget):
            heapq.heappush(queue, (seconds + cost, next(count), *state))
    return float("inf")


def _moves(memory, n, behind, items, at, budget):
    if (ALL, behind) in items:
        yield memory.links[behind].backward_s, (behind - 1, items - {(ALL, behind), (CHECKPOINT, behind)}, None)
    for stage in range(behind + 1):
        stored = stage == 0 or (CHECKPOINT, stage) in items or (ALL, stage - 1) in items
        if not stored and at != stage:
            continue
        link = memory.links[stage]
        with_input = items if stored else items | {(CHECKPOINT, stage)}
        if stage < behind:
            for passing in {items, with_input}:
                if memory.pass_(passing, stage, behind, not stored and passing == items) <= budget:
                    yield link.forward_s, (behind, passing, stage + 1)
        if (ALL, stage) not in items and memory.full(with_input, stage, behind) <= budget:
            yield link.forward_s, (behind, with_input | {(ALL, stage)}, stage + 1)


links_ = st.builds(
    lambda forward, backward, output, inside, forward_temp, backward_temp: ChainLink(
        forward, backward, output, output + inside, forward_temp, backward_temp
    ),
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 6), st.integers(0, 2), st.integers(0, 3),
)  # fmt: skip


@given(st.lists(links_, min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 60))
def test_schedules_take_what_the_table_says(links, input_bytes, budget):
    table = solve(links, input_bytes, 1, 60)
    if np.isfinite(table.seconds[0, -1, budget]):
        seconds, peak = played(links, input_bytes, table.schedule(budget))
        assert seconds == pytest.approx(table.seconds[0, -1, budget])
        assert peak <= budget


@settings(max_examples=60)
@given(st.lists(links_, min_size=1, max_size=5), st.integers(1, 3), st.integers(4, 30))
def test_no_persistent_schedule_is_faster(links, input_bytes, budget):
    table = solve(links, input_bytes, 1, 30)
    assert table.seconds[0, -1, budget] == pytest.approx(fastest(links, input_bytes, budget))


def test_times_fall_as_slots_rise():
    table = solve([ChainLink(1 + i % 3, 2, 1 + i % 4, 3 + i % 5) for i in range(20)], 1, 1, 120)
    times = table.seconds[0, -1]
    assert np.all(np.diff(times[np.isfinite(times)]) <= 1e-9)
    assert times[-1] == sum(1 + i % 3 + 2 for i in range(20))


def test_rounding_to_slots_never_promises_too_much():
    links = [ChainLink(1, 2, 10 + i, 25 + 3 * i, 2, 4) for i in range(8)]
    coarse = solve(links, 10, 7.0, 60)
    for slots in np.flatnonzero(np.isfinite(coarse.seconds[0, -1])):
        assert played(links, 10, coarse.schedule(slots))[1] <= 7.0 * slots


def test_a_hundred_stages_are_planned_at_once():
    links = [ChainLink(1 + i % 7, 2 + i % 5, 1 + i % 4, 3 + i % 9) for i in range(100)]
    start = time.perf_counter()
    table = solve(links, 1, 1.2, 500)
    assert time.perf_counter() - start < 20  # half a second on a free core
    assert np.isfinite(table.seconds[0, -1, 200])


@pytest.mark.parametrize("name", GRAPHS)
def test_policy_fits_the_budget_or_names_the_least_peak(name):
    trace = graph_trace(GRAPHS[name])
    plain_peak = simulate(trace).peak_bytes
    least = simulate(trace, POLICIES["rotor"](trace, Budget()).actions).peak_bytes
    for peak_bytes in {plain_peak, (plain_peak + least) // 2}:
        found = POLICIES["rotor"](trace, Budget(peak_bytes=peak_bytes)).actions
        assert simulate(trace, found).peak_bytes <= peak_bytes
        assert found == POLICIES["rotor"](trace, Budget(peak_bytes=peak_bytes)).actions
    with pytest.raises(InfeasibleBudgetError, match="rotor") as caught:
        POLICIES["rotor"](trace, Budget(peak_bytes=least // 4))
    assert caught.value.least_peak_bytes > least // 4


def test_policy_says_that_there_is_no_chain():
    trace = graph_trace(GRAPHS["one node"])
    with pytest.raises(InfeasibleBudgetError, match="not a chain"):
        POLICIES["rotor"](trace, Budget(peak_bytes=1))


def test_tape_takes_no_longer_than_the_schedule_where_no_stage_is_passed_thrice():
    trace = graph_trace(chain([8] * 24))
    found = find_chain(trace)
    links = [ChainLink(s.forward_seconds, s.backward_seconds, s.output_bytes, s.saved_bytes) for s in found.stages]
    table = solve(links, 0, 1, 300)
    for slots in range(60, 300, 20):
        if np.isfinite(table.seconds[0, -1, slots]):
            steps = table.schedule(slots)
            forwards = [stage for kind, stage in steps if kind != BACKWARD]
            if max(forwards.count(stage) for stage in range(len(links))) == 2:
                assert simulate(trace, actions_of(found, steps)).seconds <= table.seconds[0, -1, slots] + 1e-9


def test_mixing_kept_and_dropped_stages_beats_checkpoint_subsets():
    trace = graph_trace(GRAPHS["residual"])
    budget = Budget(peak_bytes=int(0.8 * simulate(trace).peak_bytes))
    ours, theirs = (POLICIES[policy](trace, budget) for policy in ("rotor", "optimal_fast"))
    assert ours.seconds < theirs.seconds
