"""A step guide records and carries out; the plan is due after a recorded step and is put by whoever plans."""

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import plan, signature_of
from ctdr_lightning.memory.guide.events import Differed, OverBudget, PlanMade
from ctdr_lightning.memory.guide.step_guide import StepGuide
from ctdr_lightning.memory.values.live_bytes import tell_trackers


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh())])


def run(guide, model, x):
    signature = signature_of(x, model)
    guide.begin(signature)
    loss = model(x).sum()
    guide.forward_done()
    guide.backward_begins(loss)
    loss.backward()
    guide.end()
    return signature


def test_a_plan_is_due_after_a_recorded_step_and_not_made():
    guide, model = StepGuide(), net()
    assert guide.due() is None
    run(guide, model, torch.randn(4, 8))
    assert guide.plan is None
    assert guide.due() is guide.trace is not None
    assert guide.events == []
    guide.put(plan(guide.due(), policy="sqrt"))
    assert guide.due() is None
    assert guide.events == [PlanMade(guide.plan.in_brief, ("4x8 float32",))]
    run(guide, model, torch.randn(4, 8))
    assert guide.guided


def test_a_step_without_its_plan_is_recorded_again():
    guide, model = StepGuide(), net()
    for _ in range(2):
        run(guide, model, torch.randn(4, 8))
        assert not guide.guided


def test_outdated_plans_serve_until_others_are_put():
    guide, model = StepGuide(), net()
    kinds = [run(guide, model, torch.randn(n, 8)) for n in (4, 6)]
    for kind in kinds:
        guide.plan_with(lambda trace: plan(trace, policy="sqrt"), kind)
    guide.outdate()
    assert all(guide.due(kind) is not None for kind in kinds)
    run(guide, model, torch.randn(6, 8))
    assert guide.guided
    asked = []
    guide.plan_with(lambda trace: asked.append(trace) or plan(trace, policy="keep"), kinds[0])
    assert guide.plan_of(kinds[0]).keeps_all
    assert guide.due(kinds[0]) is None
    assert guide.due(kinds[1]) is not None
    assert len(asked) == 1


def test_a_kind_that_is_to_be_recorded_anew_has_no_plan_due():
    guide, model = StepGuide(), net()
    for _ in range(2):
        kind = run(guide, model, torch.randn(4, 8))
        guide.plan_with(lambda trace: plan(trace, policy="sqrt"))
    guide.record_anew("it took more")
    assert guide.events[-1] == Differed("it took more")
    guide.outdate()
    assert guide.due(kind) is None
    run(guide, model, torch.randn(4, 8))
    assert not guide.guided


def test_a_planner_that_fails_leaves_the_plan_due():
    guide, model = StepGuide(), net()
    run(guide, model, torch.randn(4, 8))

    def fails(trace):
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        guide.plan_with(fails)
    assert guide.due() is not None


def excess_bytes(guide, **beside):
    """By how much a step that keeps everything was seen to break the budget of a guide."""
    model, x = net(), torch.randn(4, 8)
    guide.begin(signature_of(x, model), **beside)
    tell_trackers(beside.get("passing", ()))  # as a meter does
    loss = model(x).sum()
    guide.forward_done()
    loss.backward()
    guide.end()
    return sum(event.n_bytes for event in guide.events if isinstance(event, OverBudget))


def test_older_gradients_count_once():
    older = torch.zeros(2**16)
    made_bytes = excess_bytes(StepGuide(budget_bytes=0))
    assert 0 < made_bytes < older.nbytes
    budget_bytes = made_bytes + older.nbytes
    assert not excess_bytes(StepGuide(budget_bytes=budget_bytes), beside_bytes=older.nbytes, passing=[older])
    assert excess_bytes(StepGuide(budget_bytes=older.nbytes), beside_bytes=older.nbytes, passing=[older]) == made_bytes


def test_a_budget_is_not_broken_by_bytes_that_are_not_there_yet():
    guide = StepGuide(budget_bytes=2**20, static_bytes=2**20)
    over_bytes = excess_bytes(guide)
    assert over_bytes > 0
    guide = StepGuide(budget_bytes=2**20, static_bytes=2**20)
    guide.absent_bytes = over_bytes - 1
    assert excess_bytes(guide) == 1
