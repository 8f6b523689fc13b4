"""Hard steps leave the same as without an engine, to the bit: under plans, under a session's budget, in a Trainer."""

from __future__ import annotations

import pytest
import torch

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Budget, Plan, Session, Trace, plan
from ctdr_lightning.memory.guide.events import Differed
from tests.memory.hard_steps import HARD
from tests.memory.harness import Bench, check
from tests.memory.in_a_trainer import trained
from tests.memory.leaks import assert_nothing_is_installed

pytestmark = pytest.mark.usefixtures("short_searches")

SHARE = 0.75
SHIELD_BYTES = 2**13  # small buffers that a guided step copies, of which the simulator does not know


def test_there_are_as_many_as_promised():
    assert len(HARD) >= 80


@pytest.mark.parametrize("name", HARD)
def test_under_plans_and_online(name):
    torch.manual_seed(0)
    net, *rest = HARD[name]()
    check(Bench(net.train(), *rest), seeds=2)
    assert_nothing_is_installed()


@pytest.mark.parametrize("name", HARD)
def test_in_a_session_under_a_budget(name):
    torch.manual_seed(0)
    net, *rest = HARD[name]()
    bench = Bench(net.train(), *rest)
    want = bench.run()
    budget_bytes = int(SHARE * bench.peak_bytes())

    def planner(trace: Trace) -> Plan:
        # The error compares with the default policy's plan: a short search will do.
        limits = Budget(peak_bytes=trace.resident_bytes + budget_bytes, time_limit_s=0.5)
        try:
            return plan(trace, limits, "capuchin")
        except InfeasibleBudgetError as error:
            return plan(trace, error.least_peak_bytes, "capuchin")

    session = Session(planner, budget_bytes=budget_bytes)
    for _ in range(3):
        bench.reset()
        session.begin("step", meter=True)
        loss = bench.step(net)
        session.forward_done()
        bench.backward(loss)
        session.end()
        assert not bench.outcome(loss).differs_from(want)
        del loss
    assert not any(isinstance(event, Differed) for event in session.events), session.events
    allowed = session.plan.peak_bytes - session.trace.resident_bytes
    assert session.measured_peak_bytes <= allowed + SHIELD_BYTES
    assert_nothing_is_installed()


WITH_A_LOSS_ALONE = [name for name in HARD if len(HARD[name]()) == 2]


@pytest.mark.parametrize("name", WITH_A_LOSS_ALONE)
def test_in_a_trainer(name):
    want = trained(HARD[name], 3)
    found = trained(HARD[name], 3, CTDRCallback(rank=None, policy="sqrt", verbose=False))
    assert want.keys() == found.keys()
    differing = [n for n in want if not torch.equal(want[n].nan_to_num(), found[n].nan_to_num())]
    assert differing == []
    assert_nothing_is_installed()
