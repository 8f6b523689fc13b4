"""The search against every plan there is, on graphs small enough; and its own promises on larger ones."""

from itertools import product

import pytest

from ctdr_lightning.memory import KEEP, RECOMPUTE, RECOMPUTE_EACH, Simulator, simulate
from ctdr_lightning.memory.search.frontier import CHOICES, Frontier
from ctdr_lightning.memory.search.local_search import Search
from ctdr_lightning.memory.search.moves import Moves
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
    found = Search(trace).run()
    best = every_plan(trace)
    assert found.least.peak_bytes == best.least.peak_bytes
    for point in best:
        assert found.at(point.peak_bytes).seconds <= 1.03 * point.seconds


@pytest.mark.parametrize("nodes", GRAPHS.values(), ids=GRAPHS)
def test_every_point_is_what_the_simulator_says(nodes):
    trace = graph_trace(nodes)
    frontier = Search(trace).run()
    for point in frontier:
        timeline = simulate(trace, frontier.actions(point))
        assert (timeline.peak_bytes, pytest.approx(timeline.seconds)) == (point.peak_bytes, point.seconds)
    assert frontier.at(simulate(trace).peak_bytes).seconds == trace.seconds


def test_the_same_seed_finds_the_same_and_more_patience_no_less():
    trace = graph_trace(residual(6))
    first, again = Search(trace, seed=3).run(), Search(trace, seed=3).run()
    assert list(first) == list(again)
    patient = Search(trace, seed=3, patience=2.0).run()
    for point in first:
        assert patient.at(point.peak_bytes).seconds <= point.seconds


def test_it_stops_when_it_is_told_to():
    trace = graph_trace(residual(6))
    frontier = Search(trace, expired=lambda: True).run()
    assert frontier.at(simulate(trace).peak_bytes).seconds == trace.seconds


def test_deepening_goes_below_what_was_found():
    trace = graph_trace(residual(12))
    hasty = Search(trace, patience=0.002).run()
    least = hasty.least.peak_bytes
    deeper = Search(trace, frontier=hasty).deepen(lambda point: point.peak_bytes < least)
    assert deeper is hasty
    assert deeper.least.peak_bytes < least


def test_starts_are_no_worse_than_they_were():
    trace = graph_trace(residual(6))
    start = dict.fromkeys(trace.saved, RECOMPUTE)
    frontier = Search(trace, patience=0.001).run([start])
    timeline = simulate(trace, start)
    assert frontier.at(timeline.peak_bytes).seconds <= timeline.seconds


def test_a_step_without_anything_to_drop():
    trace = graph_trace([Node((), 4, saved=False)])
    assert [p.peak_bytes for p in Search(trace).run()] == [simulate(trace).peak_bytes]


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
