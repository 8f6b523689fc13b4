"""The default policy: no worse than any other at any budget, monotone, deterministic, near the best that is known."""

import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Prepared, Trace, plan, simulate
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds
from ctdr_lightning.memory.policies.auto import Descent
from ctdr_lightning.memory.search.fastest import NO_GAP
from tests.in_turn import in_turn
from tests.memory.graphs import GRAPHS, chain, graph_trace
from tests.memory.policies.test_conformance import benched

TRACES = {
    **{name: lambda nodes=nodes: graph_trace(nodes) for name, nodes in GRAPHS.items()},
    **{name: lambda name=name: benched(name)[2] for name in ("R", "T", "DenseNet-like", "no chain")},
}
SHARES = (0.95, 0.8, 0.65, 0.5, 0.4, 0.3)
others = [name for name, policy in POLICIES.items() if not policy.clocked and name not in ("auto", "keep")]


def at(trace, share):
    return int(trace.resident_bytes + share * (simulate(trace).peak_bytes - trace.resident_bytes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["residual", *in_turn([n for n in TRACES if n != "residual"], pytest.mark.slow, *[pytest.mark.exhaustive] * 2)],
)
def test_it_is_no_worse_than_any_other(name):
    trace = TRACES[name]()
    step = Prepared(trace)
    for share in SHARES:
        budget = Budget(peak_bytes=at(trace, share))
        mine = simulate(trace, POLICIES["auto"](step, budget).actions)
        for policy in others:
            try:
                other = simulate(trace, POLICIES[policy](step, budget).actions)
            except InfeasibleBudgetError:
                continue
            if other.peak_bytes <= budget.peak_bytes:
                assert mine.peak_bytes <= budget.peak_bytes
                assert mine.seconds <= other.seconds * (1 + NO_GAP)
            elif mine.peak_bytes > budget.peak_bytes:
                assert mine.peak_bytes <= other.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["T", *in_turn([n for n in TRACES if n != "T"], pytest.mark.exhaustive, pytest.mark.slow)]
)
def test_less_memory_takes_no_less_time(name):
    """Each budget is searched by itself, to a quarter of a percent of its bound."""
    trace = TRACES[name]()
    step = Prepared(trace)
    before = 0.0
    for percent in range(100, 20, -10):
        budget = at(trace, percent / 100)
        found = simulate(trace, POLICIES["auto"](step, Budget(peak_bytes=budget)).actions)
        if found.peak_bytes > budget:
            break
        assert found.seconds >= before * (1 - 0.005)
        before = max(before, found.seconds)
    assert before >= trace.seconds


def test_a_plan_that_gives_up_one_whole_value_for_a_byte_is_proven_the_best():
    trace = graph_trace(chain([4] * 10))
    made = plan(trace, simulate(trace).peak_bytes - 1)
    assert made.recompute_seconds > 0
    assert made.gap == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "u-net", "R", "T"])
def test_it_is_near_the_optimum(name):
    """Within 3 % of Checkmate's plan wherever that is found; on nets within 1 % of the bound, where there is slack."""
    trace = TRACES[name]()
    for share in (0.8, 0.6):
        budget = Budget(peak_bytes=at(trace, share), time_limit_s=2.0)
        try:
            exact = simulate(trace, POLICIES["checkmate"](trace, budget).actions)
        except InfeasibleBudgetError:
            continue
        found = simulate(trace, POLICIES["auto"](trace, Budget(peak_bytes=budget.peak_bytes)).actions)
        assert found.peak_bytes <= budget.peak_bytes
        assert found.seconds <= 1.03 * exact.seconds
        if name in ("R", "T"):
            assert found.seconds <= 1.01 * lower_bound_seconds(trace, budget.peak_bytes)


@pytest.mark.slow
def test_with_seconds_the_peak_is_made_small():
    trace = benched("T")[2]
    peaks = []
    for slowdown in (1.0, 1.05, 1.1, 1.3):
        found = simulate(trace, POLICIES["auto"](trace, Budget(seconds=slowdown * trace.seconds)).actions)
        assert found.seconds <= slowdown * trace.seconds
        peaks.append(found.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.75 * peaks[0]
    least = simulate(trace, POLICIES["auto"](trace, Budget(peak_bytes=peaks[-1])).actions)
    assert least.seconds <= 1.3 * trace.seconds


def test_without_a_budget_everything_is_kept():
    assert POLICIES["auto"](benched("T")[2], Budget()).actions == {}


@pytest.mark.slow
def test_what_does_not_fit_gives_the_least_peak():
    trace = benched("no chain")[2]
    closest = simulate(trace, POLICIES["auto"](trace, Budget(peak_bytes=trace.resident_bytes + 1)).actions)
    with pytest.raises(InfeasibleBudgetError, match="least peak") as found:
        plan(trace, trace.resident_bytes + 1)
    assert found.value.least_peak_bytes == closest.peak_bytes


@pytest.mark.slow
def test_an_answer_does_not_depend_on_what_was_asked_before():
    trace = Trace.from_json(TRACES["R"]().to_json())
    tight, usual = (Budget(peak_bytes=at(trace, share)) for share in (0.2, 0.8))
    POLICIES["auto"](trace, tight)
    assert POLICIES["auto"](trace, usual).actions == POLICIES["auto"](Trace.from_json(trace.to_json()), usual).actions


@pytest.mark.parametrize("name", ["R", "T"])
def test_a_search_that_goes_on_is_about_as_good_as_a_new_one(name):
    step = Prepared(TRACES[name]())
    descent = Descent(step, Budget(peak_bytes=at(step.trace, 0.8)))
    for share in (0.77, 0.7, 0.65):
        limit = at(step.trace, share)
        lower, new = descent.below(limit), POLICIES["auto"](step, Budget(peak_bytes=limit))
        assert lower.peak_bytes <= limit
        assert lower.seconds <= 1.02 * new.seconds
    assert descent.below(step.trace.resident_bytes) is None


def test_a_search_goes_on_from_a_step_that_fits():
    step = Prepared(TRACES["R"]())
    descent = Descent(step, Budget(peak_bytes=step.plain_peak_bytes))
    assert not descent.first.actions
    assert descent.below(at(step.trace, 0.95)).peak_bytes <= at(step.trace, 0.95)
