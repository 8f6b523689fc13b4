"""The search against every plan there is, on graphs small enough; and its own promises on larger ones."""

from itertools import count, product

import pytest

from ctdr_lightning.memory import KEEP, RECOMPUTE, RECOMPUTE_EACH, Prepared, Simulator, simulate
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds
from ctdr_lightning.memory.bounds.rounds import rounds_of
from ctdr_lightning.memory.search import fastest
from ctdr_lightning.memory.search.fastest import Fastest, smallest_within
from ctdr_lightning.memory.search.frontier import CHOICES, Frontier
from ctdr_lightning.memory.search.local_search import LocalSearch
from ctdr_lightning.memory.search.moves import Moves
from ctdr_lightning.memory.search.rounding import narrowed_plans, relaxed_plans
from tests.memory.graphs import GRAPHS, Node, chain, dense_block, graph_trace, residual, u_net

SMALL = {
    "chain": chain([4] * 7),
    "chain of all sizes": chain([5, 1, 8, 2, 7, 3, 4], [1.0, 5.0, 0.5, 2.0, 4.0, 0.1, 3.0]),
    "residual": [*residual(1), Node((4,), 8, 2.0, 4.0), Node((5,), 8, 1.0, 2.0)],
    "u-net": u_net(3),
    "dense block": dense_block(6),
}


def every_plan(trace):
    """The frontier of all plans, one by one."""
    frontier = Frontier(sorted(trace.droppable), bytes(len(trace.droppable)))
    for actions in product(CHOICES, repeat=len(frontier.items)):
        simulator = Simulator(trace, dict(zip(frontier.items, actions, strict=True)))
        frontier.add(simulator.peak_bytes, simulator.seconds, bytes)
    return frontier


@pytest.mark.parametrize("nodes", SMALL.values(), ids=SMALL)
def test_it_finds_the_best_plans_of_small_graphs(nodes):
    trace = graph_trace(nodes)
    best = every_plan(trace)
    for point in best:
        found = Fastest(Prepared(trace), LocalSearch(trace), point.peak_bytes).run()
        assert found.peak_bytes <= point.peak_bytes
        assert found.seconds <= 1.03 * point.seconds
    below = Fastest(Prepared(trace), LocalSearch(trace), best.least.peak_bytes - 1).run()
    assert below.peak_bytes == best.least.peak_bytes


@pytest.mark.parametrize("nodes", GRAPHS.values(), ids=GRAPHS)
def test_every_point_is_what_the_simulator_says(nodes):
    trace = graph_trace(nodes)
    plain = simulate(trace)
    search = LocalSearch(trace)
    Fastest(Prepared(trace), search, int(0.6 * plain.peak_bytes)).run()
    for point in search.frontier:
        timeline = simulate(trace, search.frontier.actions(point))
        assert (timeline.peak_bytes, pytest.approx(timeline.seconds)) == (point.peak_bytes, point.seconds)
    assert search.frontier.at(plain.peak_bytes).seconds == trace.seconds


def searched(trace, limit_bytes, **options):
    search = LocalSearch(trace, **options)
    search.polish({}, limit_bytes)
    search.improve(limit_bytes, lambda: False)
    return search


def test_the_same_seed_finds_the_same_and_more_work_no_less():
    trace = graph_trace(residual(6))
    limit = int(0.5 * simulate(trace).peak_bytes)
    first, again = (searched(trace, limit, seed=3, allowance=20_000) for _ in range(2))
    assert list(first.frontier) == list(again.frontier)
    longer = searched(trace, limit, seed=3, allowance=40_000)
    for point in first.frontier:
        assert longer.frontier.at(point.peak_bytes).seconds <= point.seconds


def test_it_stops_when_it_is_told_to():
    trace = graph_trace(residual(6))
    search = searched(trace, 1, limit_s=0.0)
    assert [point.seconds for point in search.frontier] == [trace.seconds]


def test_deepening_ends_where_a_random_change_is_small_enough_at_once(monkeypatch):
    trace, n_descents = graph_trace(residual(12)), count()
    small = searched(trace, int(0.8 * simulate(trace).peak_bytes)).frontier.least

    def changes_nothing(self, limit):
        assert next(n_descents) < 1000
        return self._simulator.peak_bytes <= limit

    monkeypatch.setattr(LocalSearch, "_descend", changes_nothing)
    monkeypatch.setattr(LocalSearch, "_kick", lambda self: self._moves.load(small.state))
    search = LocalSearch(trace)
    assert small.peak_bytes < search.frontier.least.peak_bytes
    search.deepen(lambda point: False)
    assert search.frontier.least == small


def test_deepening_goes_below_what_was_found():
    trace = graph_trace(residual(12))
    search = LocalSearch(trace)
    search.polish({}, int(0.8 * simulate(trace).peak_bytes))
    least = search.frontier.least.peak_bytes
    search.deepen(lambda point: point.peak_bytes < least)
    assert search.frontier.least.peak_bytes < least


def test_starts_are_no_worse_than_they_were():
    trace = graph_trace(residual(6))
    start = dict.fromkeys(trace.saved, RECOMPUTE)
    timeline = simulate(trace, start)
    search = LocalSearch(trace)
    assert search.polish(start, timeline.peak_bytes)
    assert search.frontier.at(timeline.peak_bytes).seconds <= timeline.seconds


def test_a_step_without_anything_to_drop():
    trace = graph_trace([Node((), 4, saved=False)])
    point = Fastest(Prepared(trace), LocalSearch(trace), 1).run()
    assert point.peak_bytes == simulate(trace).peak_bytes


@pytest.mark.parametrize("name", ["uniform chain", "residual"])
def test_rounded_plans_are_near_the_bound_they_come_from(name):
    """Some rounded plan fits within 15 % more bytes than asked, and none that fits beats the bound."""
    trace = graph_trace(GRAPHS[name])
    plain = Simulator(trace).bytes_at().copy()
    limit = int(0.7 * plain.max())
    bound = lower_bound_seconds(trace, limit)
    peaks = []
    for actions in relaxed_plans(Prepared(trace), limit, ((1, 0.0), (4, 0.0), (1, 0.05), (1, 0.1)), (0.5, 0.2)):
        timeline = simulate(trace, actions)
        peaks.append(timeline.peak_bytes)
        assert timeline.peak_bytes > limit or timeline.seconds >= bound * (1 - 1e-9)
    assert min(peaks) <= 1.15 * limit


@pytest.mark.parametrize(("name", "share"), [("uniform chain", 0.5), ("residual", 0.6)])
def test_a_narrowed_plan_fits_where_the_first_relaxation_breaks_the_budget(name, share):
    step = Prepared(graph_trace(GRAPHS[name]))
    limit = int(share * step.plain_peak_bytes)
    (first,) = relaxed_plans(step, limit, ((1, 0.0),), (0.5,))
    assert simulate(step.trace, first).peak_bytes > limit
    narrowed = [(bound_s, simulate(step.trace, actions)) for bound_s, actions in narrowed_plans(step, limit)]
    fitting = [timeline.seconds for _, timeline in narrowed if timeline.peak_bytes <= limit]
    assert fitting
    assert min(fitting) >= max(bound_s for bound_s, _ in narrowed) * (1 - 1e-9)


def test_relaxations_that_are_narrowed_raise_the_bound(monkeypatch):
    step = Prepared(graph_trace(GRAPHS["residual"]))
    limit = int(0.6 * step.plain_peak_bytes)
    best = max(bound_s for bound_s, _ in narrowed_plans(step, limit))
    monkeypatch.setattr(fastest, "lower_bound_seconds", lambda step, limit_bytes: step.trace.seconds)
    attempt = Fastest(step, LocalSearch(step), limit)
    assert attempt.bound_s < best
    attempt.narrow()
    assert attempt.bound_s == rounds_of(step, limit).bound_seconds == best


def test_nothing_is_narrowed_where_the_first_relaxation_fits_or_nothing_can():
    step = Prepared(graph_trace(GRAPHS["vgg"]))
    assert list(narrowed_plans(step, step.plain_peak_bytes)) == []
    assert list(narrowed_plans(step, 1)) == []


@pytest.mark.slow
def test_the_smallest_within_a_time_takes_no_longer():
    trace = graph_trace(residual(8))
    peaks = []
    for slowdown in (1.0, 1.1, 1.2, 1.4):
        point = smallest_within(Prepared(trace), LocalSearch(trace), slowdown * trace.seconds)
        assert point.seconds <= slowdown * trace.seconds
        peaks.append(point.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def test_moves_tell_what_they_do():
    trace = graph_trace(residual(3))
    moves = Moves(Simulator(trace))
    everywhere = moves.simulator.bytes_at() >= 0
    before = moves.simulator.bytes_at().sum(), moves.simulator.seconds
    for move in range(len(moves.usable)):
        if moves.usable[move]:
            item, choice = divmod(move, len(CHOICES))
            changed = Simulator(trace, {moves.items[item]: CHOICES[choice]})
            assert changed.bytes_at().sum() - before[0] == moves.weigh(everywhere)[move]
            assert changed.seconds - before[1] == pytest.approx(moves.seconds[move])


def test_moves_follow_the_plan():
    trace = graph_trace(residual(3))
    moves = Moves(Simulator(trace))
    state = moves.state_of({trace.saved[2]: RECOMPUTE_EACH, trace.saved[3]: KEEP})
    moves.load(state)
    assert bytes(moves.state) == state
    assert moves.simulator.seconds == simulate(trace, {trace.saved[2]: RECOMPUTE_EACH}).seconds
    moves.make(len(CHOICES) * moves.items.index(trace.saved[2]) + CHOICES.index(KEEP))
    assert bytes(moves.state) == moves.default
    assert moves.simulator.seconds == trace.seconds


def test_a_block_of_work_ends_where_the_whole_does():
    search = LocalSearch(graph_trace(GRAPHS["residual"]), allowance=10_000)
    with search.at_most(0.0):
        assert search.done()
        assert not search.polish({}, 1)
        assert search.work < 10_000
    assert not search.done()
    search.allow(0.0)
    with search.at_most(1.0):
        assert search.done()
