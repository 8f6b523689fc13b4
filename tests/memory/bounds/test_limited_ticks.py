"""Where bytes are limited next: the worst places of a plan that breaks its budget."""

from ctdr_lightning.memory import RECOMPUTE, Prepared, simulate
from ctdr_lightning.memory.bounds.limited_ticks import TICKS_A_PLAN, LimitedTicks
from tests.memory.graphs import GRAPHS, graph_trace


def test_it_begins_where_the_plain_step_is_over_the_budget():
    step = Prepared(graph_trace(GRAPHS["residual"]))
    (tick,) = LimitedTicks(step, step.plain_peak_bytes - 1).ticks
    assert step.plain_bytes_at[tick] == step.plain_peak_bytes


def test_the_worst_places_of_a_plan_are_added_as_ticks_of_ops():
    step = Prepared(graph_trace(GRAPHS["residual"]))
    limited = LimitedTicks(step, step.plain_peak_bytes // 3)
    before = set(limited.ticks)
    assert limited.add_worst(dict.fromkeys(step.trace.droppable, RECOMPUTE))
    added = limited.ticks - before
    assert 1 <= len(added) <= 2 * TICKS_A_PLAN  # an unpack is limited on both sides
    assert added <= {op.tick for op in step.trace.ops}


def test_nothing_is_added_for_a_plan_that_fits_or_that_broke_the_budget_there_before():
    step = Prepared(graph_trace(GRAPHS["residual"]))
    actions = dict.fromkeys(step.trace.droppable, RECOMPUTE)
    fits = LimitedTicks(step, simulate(step.trace, actions).peak_bytes)
    assert not fits.add_worst(actions)
    limited = LimitedTicks(step, step.plain_peak_bytes // 3)
    for _ in range(len(step.trace.ops)):
        if not limited.add_worst(actions):
            break
    assert not limited.add_worst(actions)
