"""What every registered policy promises, on every kind of net."""

from functools import cache
from random import Random

import pytest

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Plan, Prepared, Tape, Trace, plan, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.policies import auto
from tests.memory.policies.nets import CONFORMANCE, bench_of, quick

SHARES = (None, 0.8, 0.5)
CLOCKED = {name for name, policy in POLICIES.items() if policy.clocked}
TIME_LIMIT_S = 1.5


@cache
def benched(name):
    """The net, what its plain step leaves behind, and its trace with seconds that do not depend on the machine."""
    bench = bench_of(name)
    trace = bench.record()
    seconds = [1e-6 + trace.value_bytes(op.outputs[0]) * 1e-9 if op.outputs else 1e-6 for op in trace.ops]
    return bench, bench.run(), trace.with_costs(seconds, {})


@cache
def step_of(name):
    """The same trace, with what all policies make of it."""
    return Prepared(benched(name)[2])


def limits(trace, share, policy):
    peak = simulate(trace).peak_bytes
    budget = None if share is None else trace.resident_bytes + int(share * (peak - trace.resident_bytes))
    return Budget(peak_bytes=budget, time_limit_s=TIME_LIMIT_S if policy in CLOCKED else 5.0)


def test_the_published_ones_are_there():
    assert {
        "keep", "sqrt", "optimal", "optimal_fast", "rotor", "checkmate", "superneurons", "megatron", "capuchin", "dtr",
        "auto",
    } <= set(POLICIES)  # fmt: skip


def planned(step, budget, policy):
    """The plan, or the error that says that there is none."""
    try:
        return plan(step, budget, policy)
    except InfeasibleBudgetError as error:
        return error


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("net", quick(CONFORMANCE))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_covers_fits_round_trips_and_is_exact(policy, net, share):
    bench, plain, trace = benched(net)
    budget = limits(trace, share, policy)
    made = planned(step_of(net), budget, policy)
    if not isinstance(made, Plan):
        assert budget.peak_bytes is not None
        assert made.least_peak_bytes > budget.peak_bytes
        assert made.hint
        return
    assert {d.value for d in made.decisions} >= set(trace.saved)
    assert len({d.value for d in made.decisions}) == len(made.decisions)
    timeline = simulate(trace, made)
    assert (made.peak_bytes, made.seconds) == (timeline.peak_bytes, pytest.approx(timeline.seconds))
    assert budget.peak_bytes is None or floor_bytes(trace) <= made.peak_bytes <= budget.peak_bytes
    assert made.bound_seconds <= made.seconds * (1 + 1e-9)
    assert Plan.from_json(made.to_json()) == made
    tape = Tape(made)
    assert not bench.run(tape).differs_from(plain)
    assert not tape.diverged


@pytest.mark.parametrize("net", quick(["residual", "T", "no chain"]))
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in CLOCKED])
def test_the_same_trace_gives_the_same_plan(policy, net):
    trace = benched(net)[2]
    again = Trace.from_json(trace.to_json())
    for share in (None, 0.8):
        budget = limits(trace, share, policy)
        try:
            first = POLICIES[policy](trace, budget).actions
        except InfeasibleBudgetError:
            with pytest.raises(InfeasibleBudgetError):
                POLICIES[policy](again, budget)
        else:
            assert POLICIES[policy](again, budget).actions == first


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("net", quick(["residual"]))
@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in CLOCKED])
def test_a_budget_that_an_error_names_is_accepted(policy, net, seed, monkeypatch):
    """Whatever the ops take: what a policy evicts first hangs on seconds that another run measures otherwise."""
    monkeypatch.setattr(auto, "WORK_AT_LEAST", auto.WORK_AT_LEAST // 10)  # of any search, which an error asks too
    trace, random = benched(net)[2], Random(seed)
    trace = trace.with_costs([random.expovariate(1e4) for _ in trace.ops], {})
    found = planned(trace, Budget(peak_bytes=1), policy)
    assert isinstance(found, InfeasibleBudgetError)
    for roomy in (1.0, 1.1):
        budget = Budget(peak_bytes=int(roomy * found.least_peak_bytes))
        assert plan(trace, budget, policy).peak_bytes <= budget.peak_bytes
