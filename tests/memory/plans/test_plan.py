import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.documents import plain_of, read_record
from ctdr_lightning.basics.errors import CheckpointError, ConfigError, InfeasibleBudgetError
from ctdr_lightning.memory import KEEP, POLICIES, RECOMPUTE, RECOMPUTE_EACH, Budget, Plan, plan, record, simulate
from ctdr_lightning.memory.planner import resolve_budget
from ctdr_lightning.memory.plans.plan import Decision
from ctdr_lightning.memory.plans.script import write_script
from ctdr_lightning.memory.search.infeasible import culprit
from ctdr_lightning.memory.simulator.actions import action_of, dropped_values
from tests.memory.graphs import chain, graph_trace
from tests.memory.harness import everything_dropped, planned


def net_trace():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.Flatten(),
    )  # fmt: skip
    return record(lambda: net(torch.randn(2, 3, 8, 8)).square().mean())


TRACE = net_trace()


def made_by(name):
    return next(op.outputs[0] for op in TRACE.ops if op.name.startswith(f"aten.{name}."))


def line_of(name, actions):
    position = next(i for i, o in enumerate(TRACE.forward_ops) if TRACE.ops[o].name.startswith(f"aten.{name}."))
    return write_script(TRACE, actions)[position]


def test_default_actions():
    assert action_of(TRACE, {}, made_by("convolution")) == KEEP, "autograd saved it"
    norm = made_by("native_batch_norm")
    assert action_of(TRACE, {}, norm) == RECOMPUTE_EACH, "autograd did not, and nothing is said of it"
    assert action_of(TRACE, {made_by("convolution"): RECOMPUTE_EACH}, made_by("convolution")) == RECOMPUTE_EACH


def test_what_may_not_be_recomputed_is_kept_whatever_is_asked():
    mask = made_by("bernoulli_")
    assert TRACE.values[mask].pin == "uninitialised memory" or "random" in TRACE.values[mask].pin
    assert action_of(TRACE, {mask: RECOMPUTE}, mask) == KEEP


def test_what_is_written_over_cannot_be_held():
    norm = made_by("native_batch_norm")
    assert norm in TRACE.unholdable
    assert action_of(TRACE, {norm: KEEP}, norm) == RECOMPUTE
    assert action_of(TRACE, {norm: RECOMPUTE_EACH}, norm) == RECOMPUTE_EACH


def test_only_what_is_needed_is_dropped():
    relu, norm, conv = made_by("relu_"), made_by("native_batch_norm"), made_by("convolution")
    assert dropped_values(TRACE, {}) == set()
    assert dropped_values(TRACE, {conv: RECOMPUTE}) == {conv}
    assert {relu, norm} <= dropped_values(TRACE, {relu: RECOMPUTE})
    assert conv not in dropped_values(TRACE, {relu: RECOMPUTE})


def test_the_script():
    relu, norm, conv = made_by("relu_"), made_by("native_batch_norm"), made_by("convolution")
    kept = write_script(TRACE, {})
    assert len(kept) == len(TRACE.forward_ops)
    assert not any(line.replay for line in kept)
    assert kept[0].shape == TRACE.values[TRACE.ops[TRACE.forward_ops[0]].outputs[0]].shape
    dropped = {relu: RECOMPUTE, conv: RECOMPUTE_EACH}
    assert line_of("relu_", dropped).stays == ("awaited",)
    assert line_of("convolution", dropped).stays == ("no",)
    assert line_of("native_batch_norm", dropped).stays[0] == "no"
    assert line_of("native_batch_norm", dropped | {norm: RECOMPUTE}).stays[0] == "needed"
    mean = TRACE.ops[TRACE.values[norm].op].outputs[1]
    assert line_of("native_batch_norm", dropped | {mean: KEEP}).stays[1] == "kept"


def test_nobody_need_see_a_view_unless_something_was_written_in_place():
    weight = torch.ones(2, 3, requires_grad=True)
    trace = record(lambda: (weight.exp().view(-1).sin() * (weight * 2).relu_().view(-1).cos()).sum())
    lines = write_script(trace, everything_dropped(trace))
    assert [line.replay for line in lines if line.op == "aten.view.default"] == [False, True]
    assert sum(line.replay for line in lines) == 6, "exp, sin, mul, relu_ and its view, cos"


def test_a_plan_speaks():
    made = planned(TRACE, everything_dropped(TRACE))
    head, *sentences = made.explain().splitlines()
    assert "predicted peak" in head
    assert "recomputation" in head
    assert len(sentences) == len(made.decisions)
    conv = next(s for s in sentences if s.startswith("0 (convolution)"))
    assert "recomputed, frees 2.2 KiB for" in conv
    assert any("kept, holds" in s for s in sentences), "the dropout mask"
    assert "each time it is used" in planned(TRACE, {made_by("convolution"): RECOMPUTE_EACH}).explain()


def test_an_op_without_a_namespace_is_called_as_it_is():
    trace = graph_trace(chain([4, 4, 4]))
    for name, says in (("fused", " (fused): kept"), ("", " (): kept")):
        made = planned(replace(trace, ops=tuple(replace(op, name=name) for op in trace.ops)), {})
        assert says in made.explain()


def test_json_round_trip(tmp_path):
    made = plan(TRACE, policy="sqrt")
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    assert Plan.from_json(made.to_json()) == made
    lines = (tmp_path / "plan.json").read_text().splitlines()
    rows = [line for line in lines if line.startswith('{"value"')]
    assert len(rows) == len(made.decisions), "one a line, so that plans can be compared"


def edited(made, edit):
    """The plan's document after an edit by hand."""
    data = json.loads(made.to_json())
    edit(data)
    return json.dumps(data)


def test_a_plan_s_document_says_nothing_twice():
    data = json.loads(planned(TRACE, everything_dropped(TRACE)).to_json())
    assert set(data) == {"kind", "version", "policy", "budget_bytes", "bound_seconds", "options", "actions", "trace"}


def test_an_edited_action_changes_everything_that_follows_from_it():
    made = planned(TRACE, everything_dropped(TRACE))
    assert any(line.replay for line in made.script)

    def keep_everything(data):
        data["bound_seconds"] = 0.0
        for row in data["actions"]:
            row["action"] = {"kind": "keep"}

    kept = Plan.from_json(edited(made, keep_everything))
    assert kept.keeps_all
    assert not any(line.replay for line in kept.script)
    assert kept.peak_bytes == simulate(TRACE).peak_bytes
    assert kept.seconds == simulate(TRACE).seconds < made.seconds
    assert kept.recompute_seconds == 0
    assert "recomputed" not in kept.explain()


MASK = made_by("bernoulli_")
CONTRADICTIONS = {
    "an unknown kind": lambda data: data["actions"][0]["action"].update(kind="burn"),
    "no kind": lambda data: data["actions"][0]["action"].pop("kind"),
    "a wrong type": lambda data: data["actions"][0]["action"].update(stays="yes"),
    "two actions for a value": lambda data: data["actions"].append(data["actions"][0]),
    "a value that there is not": lambda data: data["actions"][0].update(value=10**6),
    "a value from before the step": lambda data: data["actions"][0].update(
        value=next(i for i, v in enumerate(TRACE.values) if v.op < 0)
    ),
    "a random value made again": lambda data: data["actions"].append(
        {"value": MASK, "action": {"kind": "recompute", "stays": True}}
    ),
    "a budget that it breaks": lambda data: data.update(budget_bytes=1),
    "a bound above its own time": lambda data: data.update(bound_seconds=1e9),
    "a bound that is no number": lambda data: data.update(bound_seconds=float("nan")),
    "a negative bound": lambda data: data.update(bound_seconds=-1.0),
    "no policy": lambda data: data.pop("policy"),
    "no trace": lambda data: data.pop("trace"),
    "a plan for a trace": lambda data: data["trace"].update(kind="plan"),
    "a region beyond all bounds": lambda data: data["trace"]["ops"][0].__setitem__(9, 10**9),
    "a training module too many": lambda data: data["trace"].update(n_training=10**9),
    "seconds that are no number": lambda data: data["trace"]["ops"][0].__setitem__(4, float("nan")),
}


@pytest.mark.parametrize("edit", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_plan_that_contradicts_itself_does_not_load(edit):
    made = planned(TRACE, {v: a for v, a in everything_dropped(TRACE).items() if v != MASK})
    made = Plan.from_json(edited(made, lambda data: data.update(actions=data["actions"][:-1])))
    drop_mask = [row for row in json.loads(made.to_json())["actions"] if row["value"] != MASK]
    text = edited(made, lambda data: (data.update(actions=drop_mask), edit(data)))
    with pytest.raises(CheckpointError, match=r"(damaged|version)(?s:.*)HINT"):
        Plan.from_json(text)


def test_budgets():
    assert resolve_budget("1KiB", "cpu") == Budget(peak_bytes=1024)
    assert resolve_budget(None, "cpu") == Budget()
    given = Budget(seconds=2.0)
    assert resolve_budget(given, "cpu") is given
    with pytest.raises(ConfigError):
        resolve_budget("much", "cpu")


def test_static_bytes_are_counted():
    trace = graph_trace(chain([8] * 9))
    bare, more = plan(trace, policy="sqrt"), plan(trace.with_static(100), policy="sqrt")
    assert more.peak_bytes == bare.peak_bytes + 100
    assert plan(trace.with_static(100), bare.peak_bytes + 100, policy="sqrt").budget_bytes == bare.peak_bytes + 100


def test_a_budget_that_is_too_small():
    trace = graph_trace(chain([8] * 9))
    with pytest.raises(InfeasibleBudgetError, match=r"(?s)least peak.*HINT: .*memory_budget") as found:
        plan(trace, 9, policy="sqrt")
    assert found.value.least_peak_bytes == plan(trace, policy="sqrt").peak_bytes
    assert "8 B" in culprit(simulate(trace))


def test_policies_by_name_and_as_callables():
    assert plan(TRACE, policy="keep").keeps_all
    with pytest.raises(ConfigError, match="policy"):
        plan(TRACE, policy="unknown")

    def mine(step, budget):
        return dict.fromkeys(step.trace.saved, RECOMPUTE)

    made = plan(TRACE, policy=mine)
    assert made.policy == "mine"
    assert not made.keeps_all
    assert made.recompute_seconds > 0
    assert made.gap >= 0
    assert {"keep", "sqrt"} <= set(POLICIES)


@pytest.mark.parametrize("action", [KEEP, RECOMPUTE, RECOMPUTE_EACH])
def test_an_action_is_a_record_that_says_its_kind(action):
    row = Decision(3, "layer", "aten.relu.default", 8, 0.5, action)
    written = plain_of(row)
    assert written["action"]["kind"] == action.kind
    assert read_record(Decision, written) == row
    for damaged in ({"kind": "burn"}, {"stays": True}, {**written["action"], "holder": "moon"}, "keep", None):
        with pytest.raises(ValueError, match=r"kind|unknown"):
            read_record(Decision, {**written, "action": damaged})
