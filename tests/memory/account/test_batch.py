"""One account of a batch: the step, the memory beside it, and the optimizer's step after it."""

import pytest
import torch
from torch import nn

from ctdr_lightning import plan, record, simulate
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory.account.batch import BatchAccount, with_room
from ctdr_lightning.memory.account.fit import least_peak_bytes, planned_peak_bytes
from ctdr_lightning.memory.traces.optimizer import OptimizerBytes

WEIGHT_BYTES = 4 * 64 * 64


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64, bias=False), nn.Tanh())])
    x = torch.randn(128, 64)
    return record(lambda: net(x).sum())


SIZES = [WEIGHT_BYTES] * 4


def test_an_optimizer_without_bytes_adds_nothing(step):
    account = BatchAccount(step)
    assert simulate(account.standing).peak_bytes == simulate(step).peak_bytes == simulate(account.whole).peak_bytes
    assert account.rest_bytes == simulate(step).bytes_at[-1]


def test_state_stands_all_along_and_temporaries_after_the_backward(step):
    plain, account = BatchAccount(step), BatchAccount(step, OptimizerBytes(state=1000, temporary=10**6))
    assert simulate(account.standing).peak_bytes - simulate(step).peak_bytes == 1000
    assert account.rest_bytes - plain.rest_bytes == 10**6 + 1000
    assert simulate(account.whole).peak_bytes == account.rest_bytes


def test_copies_are_gone_when_the_optimizer_steps_and_kept_gradients_when_the_backward_begins(step):
    plain = BatchAccount(step)
    copied, kept = BatchAccount(step, copied_bytes=4096), BatchAccount(step, kept_bytes=4096)
    assert copied.rest_bytes == kept.rest_bytes == plain.rest_bytes
    assert simulate(copied.standing).peak_bytes == simulate(step).peak_bytes + 4096
    backward = min(op.tick for op in step.ops if op.backward)
    more = simulate(kept.standing).bytes_at - simulate(step).bytes_at
    assert set(more[: backward - 1]) == {4096}
    assert set(more[backward:]) == {0}


def test_a_step_inside_the_backward_keeps_one_gradient_at_a_time_and_adding_keeps_all(step):
    optimizer = OptimizerBytes(temporary=100)
    plain = BatchAccount(step, optimizer)
    inside, adding = plain.stepping_inside(SIZES, optimizer), plain.adding(SIZES)
    assert plain.rest_bytes - inside.rest_bytes == 3 * WEIGHT_BYTES
    assert simulate(adding.standing).peak_bytes >= simulate(plain.standing).peak_bytes
    assert adding.step.resident_bytes - step.resident_bytes == sum(SIZES)
    assert adding.adding(SIZES) == adding  # a part of an accumulated batch adds to the same gradients


def test_it_fits_where_both_the_plan_and_the_optimizers_step_do(step):
    account = BatchAccount(step, OptimizerBytes(temporary=10**6))
    made = plan(account.standing)
    assert account.peak_bytes(made) == account.rest_bytes > made.peak_bytes
    assert account.fits(made, account.rest_bytes)
    assert not account.fits(made, account.rest_bytes - 1)


def test_no_plan_goes_below_the_floor_and_a_peak_beyond_the_budget_says_so(step):
    account = BatchAccount(step)
    assert account.floor_bytes <= plan(step).peak_bytes
    assert planned_peak_bytes(account, account.floor_bytes - 1, "auto") >= account.floor_bytes
    whole = simulate(step).peak_bytes
    assert planned_peak_bytes(account, whole, "keep") == whole
    assert planned_peak_bytes(account, whole - 1, "keep") == whole
    assert least_peak_bytes(step, whole - 1, "keep") == whole
    with pytest.raises(InfeasibleBudgetError):
        plan(step, whole - 1, "keep")


def test_copies_get_an_eighth_of_room():
    assert [with_room(n) for n in (0, 80_000)] == [0, 90_000]


def test_copies_that_grow_by_a_number_a_step_have_room_for_a_thousand_steps():
    assert with_room(4) >= 4 * 1024
