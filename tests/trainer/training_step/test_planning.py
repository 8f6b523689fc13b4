"""One place plans the batches of a run: it raises, warns once, or plans as small as it can."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ctdr_lightning import plan, record
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Prepared
from ctdr_lightning.memory.account.batch import with_room
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.policies import Budget
from ctdr_lightning.memory.traces.optimizer import OptimizerBytes
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step import planning
from ctdr_lightning.trainer.training_step.bytes_beside import BytesBeside
from ctdr_lightning.trainer.training_step.planning import BatchPlanner


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh())])
    x = torch.randn(256, 16)
    return record(lambda: net(x).sum())


def planner(budget_bytes, batch=0, **options):
    given = CallbackOptions(
        **{"rank": None, "memory_budget": budget_bytes, "policy": "sqrt", "verbose": False, **options}
    )
    made = BatchPlanner(given, BytesBeside(given), Places(), budget_bytes)
    made.attach(
        SimpleNamespace(
            trainer=SimpleNamespace(
                lightning_module=None,
                is_global_zero=True,
                accumulate_grad_batches=1,
                optimizers=[],
                fit_loop=SimpleNamespace(total_batch_idx=batch),
            )
        )
    )
    return made


def test_a_batch_that_fits_is_planned_with_all_beside_it(step):
    made = planner(2**30)
    made._beside.optimizer = OptimizerBytes(state=1000, temporary=500)
    made._beside.copies(800)
    found = made(step)
    assert found.trace.resident_bytes - step.resident_bytes == 1000 + with_room(800)
    assert made.rest_peak_bytes == step.resident_bytes + 1500 + (
        found.timeline.bytes_at[-1] - found.trace.resident_bytes
    )


def test_the_first_that_does_not_fit_ends_the_run_a_later_one_is_warned_of_once(step):
    least = plan(step, policy="sqrt").peak_bytes
    with pytest.raises(InfeasibleBudgetError, match="sqrt"):
        planner(least - 1)(step)
    made = planner(least)
    made(step)
    with pytest.warns(UserWarning, match="with the smallest plan found"):
        found = made(step.with_static(4096))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(step.with_static(4096)).peak_bytes == found.peak_bytes <= least + 4096


def test_a_run_that_has_trained_is_not_ended_by_the_batch_that_comes_first_when_it_is_resumed(step):
    least = plan(step, policy="sqrt").peak_bytes
    with pytest.warns(UserWarning, match="with the smallest plan found"):
        assert planner(least - 1, batch=1)(step).peak_bytes <= least
    with pytest.raises(InfeasibleBudgetError):
        planner(least - 1, batch=1, over_budget="raise")(step)


def test_the_smallest_plan_found_is_that_of_any_search(step, monkeypatch):
    def of_less(step, budget):
        return plan(step, policy="keep") if isinstance(budget, Budget) else plan(step, budget)

    least = plan(step, Budget(seconds=math.inf)).peak_bytes
    monkeypatch.setattr(planning, "plan", of_less)
    assert planning._smallest(Prepared(step), least).peak_bytes == least
    assert planning._smallest(Prepared(step), least // 2).keeps_all


@pytest.mark.parametrize("over_budget", ["raise", "least"])
def test_over_budget_says_which(step, over_budget):
    made = planner(plan(step, policy="sqrt").peak_bytes - 1, over_budget=over_budget)
    if over_budget == "raise":
        with pytest.raises(InfeasibleBudgetError):
            made(step)
    else:
        with pytest.warns(UserWarning, match="the smallest plan found"):
            made(step)


def test_after_memory_ran_out_nothing_is_refused(step):
    made = planner(2**30)
    made.tighten(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(step).peak_bytes > 1000
    assert made.budget_bytes == 1000


def test_an_optimizers_step_that_does_not_fit_is_told_by_its_parts(step):
    made = planner(plan(step).peak_bytes * 2, over_budget="least")
    made._beside.optimizer = OptimizerBytes(temporary=2**30)
    with pytest.warns(UserWarning, match=r"The optimizer's step does not fit.*its temporaries 1\.00 GiB"):
        made(step)
