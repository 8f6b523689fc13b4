"""What is said of each policy at its registration holds, and its options travel into the plan and its file."""

from collections import Counter
from contextlib import suppress

import pytest

from ctdr_lightning.basics.errors import CheckpointError, ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, RECOMPUTE, Budget, Plan, Prepared, plan, simulate
from ctdr_lightning.memory.policies.registry import Policy
from ctdr_lightning.memory.simulator.actions import Compress, Keep, Offload, Recompute, action_of
from ctdr_lightning.memory.simulator.simulator import Simulator
from tests.memory.graphs import GRAPHS, chain, graph_trace
from tests.memory.policies.nets import bench_of

TRACE = graph_trace(GRAPHS["residual"])
PEAK = simulate(TRACE).peak_bytes


def test_facts_of_known_policies():
    said = {name: (policy.exact, policy.clocked) for name, policy in POLICIES.items()}
    assert said["checkmate"] == (True, True)
    assert said["keep"] == said["sqrt"] == said["dtr"] == (True, False)
    assert not POLICIES["gist"].exact


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "auto"])
def test_a_policy_uses_the_actions_that_are_said_and_no_other(policy):
    trace = bench_of("T").record()
    for share in (0.5, 0.7, 0.9):
        budget = Budget(trace.resident_bytes + int(share * (simulate(trace).peak_bytes - trace.resident_bytes)))
        with suppress(InfeasibleBudgetError):
            made = POLICIES[policy](trace, budget)
            assert {type(action_of(trace, made.actions, v)) for v in made.actions} <= POLICIES[policy].uses


def test_what_only_moves_works_where_there_is_a_link():
    assert not POLICIES["vdnn"].works_on(TRACE)
    assert not POLICIES["gist"].works_on(TRACE)
    assert POLICIES["dtr"].works_on(TRACE)
    assert not POLICIES["keep"].works_on(TRACE)
    kinds = Policy("mine", lambda step, budget: {}, uses=frozenset({Keep, Offload, Compress, Recompute}))
    assert kinds.works_on(TRACE)


def test_options_change_a_policy_travel_with_its_plan_and_are_read_back():
    coarse = POLICIES["rotor"].with_options(n_slots=20)
    made = plan(TRACE, PEAK - 2, coarse)
    assert made.policy == "rotor"
    assert made.options == {"n_slots": 20, "most_stages": 128}
    assert POLICIES["rotor"].option_values["n_slots"] == 500
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.options == made.options
    with pytest.raises(CheckpointError, match="options"):
        Plan.from_json(made.to_json().replace('"n_slots": 20', '"n_slots": [20]'))


def test_an_unknown_option_is_named():
    with pytest.raises(ConfigError, match=r"no option 'slots'.\n.*most_stages, n_slots"):
        POLICIES["rotor"].with_options(slots=3)
    with pytest.raises(ConfigError, match="none"):
        POLICIES["dtr"].with_options(slots=3)
    assert POLICIES["dtr"].with_options() is POLICIES["dtr"]


@pytest.mark.slow
def test_a_prepared_step_is_prepared_once_and_gives_the_same_plans():
    step = Prepared(TRACE)
    index, live = step.index, step.plain_bytes_at
    assert live.max() == step.plain_peak_bytes == PEAK
    for share in (0.9, 0.7):
        assert plan(step, int(share * PEAK)) == plan(TRACE, int(share * PEAK))
    assert step.index is index
    assert step.plain_bytes_at is live
    assert Simulator(step, {0: RECOMPUTE}).bytes_at() is not live
    with pytest.raises(ValueError, match="read-only"):
        live[0] = 1
    assert step.once("mine", lambda: 1) == step.once("mine", lambda: 2) == 1


@pytest.mark.parametrize("policy", ["capuchin", "rotor", "optimal", "dtr"])
def test_a_candidate_is_simulated_once(policy, monkeypatch):
    """The plan's timeline is the one by which the policy chose: planning simulates no more than choosing does."""
    step = Prepared(graph_trace(chain([4, 8, 2, 8, 4, 2, 8, 8])))
    count = Counter()
    timeline = Simulator.timeline

    def counted(self):
        count["timelines"] += 1
        return timeline(self)

    monkeypatch.setattr(Simulator, "timeline", counted)
    budget = Budget(peak_bytes=int(0.8 * step.plain_peak_bytes))
    POLICIES[policy](step, budget)
    chosen = count.pop("timelines")
    plan(step, budget, policy)
    assert count["timelines"] == chosen


@pytest.mark.parametrize("policy", ["auto", "sqrt", "rotor", "keep"])
def test_fewer_seconds_than_the_plain_step_takes_are_refused_with_a_hint(policy):
    for seconds in (0.0, -1.0, 0.99 * TRACE.seconds, float("nan")):
        with pytest.raises(ConfigError, match="less than the plain step takes") as found:
            plan(TRACE, Budget(seconds=seconds), policy)
        assert f"at least {TRACE.seconds:.6g} seconds" in found.value.hint
    assert plan(TRACE, Budget(seconds=TRACE.seconds), "auto").seconds == TRACE.seconds
