"""DTR on its ground: the paper's chains, and the projection's own promises."""

import math
from random import Random

import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Prepared, Simulator, simulate
from ctdr_lightning.memory.policies.dtr import MOST_CANDIDATES, THRASHES, Projection
from tests.memory.graphs import chain, graph_trace, residual
from tests.memory.policies.test_conformance import benched


@pytest.mark.parametrize("n", [36, 64, 100, 196])
def test_a_chain_of_n_ops_runs_in_root_n_memory_with_order_n_ops(n):
    """Theorem 3.1: N unit layers in O(sqrt N) memory and O(N) operations."""
    trace = graph_trace(chain([1] * n))
    budget = 4 * math.isqrt(n)
    found = simulate(trace, POLICIES["dtr"](trace, Budget(peak_bytes=budget)).actions)
    assert found.peak_bytes <= budget < simulate(trace).peak_bytes
    assert found.recompute_seconds <= 2 * n


def test_nothing_is_evicted_where_everything_fits():
    trace = graph_trace(residual(4))
    assert POLICIES["dtr"](trace, Budget(peak_bytes=simulate(trace).peak_bytes)).actions == {}


def test_cheap_large_stale_values_go_first():
    trace = graph_trace(chain([8, 8, 8, 8, 8, 8], [5.0, 1.0, 5.0, 5.0, 5.0, 5.0]))
    plain = Simulator(trace)
    assert list(Projection(Prepared(trace), plain.peak_bytes - 1).run()) == [1]
    large = graph_trace(chain([8, 8, 24, 8, 8, 8]))
    plain = Simulator(large)
    assert next(iter(Projection(Prepared(large), plain.peak_bytes - 1).run())) in (0, 2)


def test_the_budget_holds_or_the_error_tells_the_least_peak():
    trace = graph_trace(residual(8))
    plain = simulate(trace).peak_bytes
    for share in (0.9, 0.7, 0.5):
        assert POLICIES["dtr"](trace, Budget(peak_bytes=int(share * plain))).peak_bytes <= share * plain
    with pytest.raises(InfeasibleBudgetError) as found:
        POLICIES["dtr"](trace, Budget(peak_bytes=9))
    assert 9 < found.value.least_peak_bytes < plain


@pytest.mark.parametrize(("name", "lowest"), [("R", 0.6), ("T", 0.7), ("DenseNet-like", 0.5)])
def test_the_plan_is_as_fast_as_the_rule_itself(name, lowest):
    """Within 10 % of the time that the online rule takes on the same trace, down to where few come back in time."""
    step = Prepared(benched(name)[2])
    resident = step.trace.resident_bytes
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        limit = int(resident + share * (step.plain_peak_bytes - resident))
        rule = Projection(step, limit)
        rule.run()
        if share >= lowest:
            assert POLICIES["dtr"](step, Budget(peak_bytes=limit)).seconds <= 1.1 * rule.seconds


def test_of_many_candidates_a_sample_is_compared_which_is_the_same_each_time():
    step = Prepared(graph_trace(chain([8] * 400)))
    compared = []

    class Counting(Projection):
        def _score(self, value):
            compared.append(value)
            return super()._score(value)

    room = step.plain_peak_bytes - 8
    first, second = Counting(step, room).run(), Counting(step, room).run()
    assert first == second
    assert len(compared) == 2 * MOST_CANDIDATES * sum(first.values())


@pytest.mark.slow
def test_a_policy_that_thrashes_is_given_up():
    step = Prepared(graph_trace(chain([8] * 200)))
    rule = Projection(step, 16)
    rule.run()
    assert rule.thrashes
    assert rule.seconds < 2 * THRASHES * step.trace.seconds
    with pytest.raises(InfeasibleBudgetError) as found:
        POLICIES["dtr"](step, Budget(peak_bytes=16))
    assert 16 < found.value.least_peak_bytes <= step.plain_peak_bytes


@pytest.mark.parametrize("seed", [270, 294, 296, 297])
def test_what_fits_a_small_budget_fits_a_larger_one(seed):
    """Without the projection that evicts all, the larger budget is refused on these chains."""
    random = Random(seed)
    sizes = [random.choice((1, 2, 4)) for _ in range(10)]
    trace = graph_trace(chain(sizes, [random.expovariate(1) for _ in sizes]))
    with pytest.raises(InfeasibleBudgetError) as found:
        POLICIES["dtr"](trace, Budget(peak_bytes=1))
    for budget in range(found.value.least_peak_bytes, simulate(trace).peak_bytes):
        assert POLICIES["dtr"](trace, Budget(peak_bytes=budget)).peak_bytes <= budget
