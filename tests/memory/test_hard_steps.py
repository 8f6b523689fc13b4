"""Hard steps leave the same as without an engine, to the bit: under plans, under a session's budget, in a Trainer."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Budget, Plan, Session, Trace, plan
from ctdr_lightning.memory.guide.events import Differed
from tests.memory.hard_steps import HARD
from tests.memory.harness import Bench, check
from tests.memory.leaks import assert_nothing_is_installed
from tests.parts import fit

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


class Hard(LightningModule):
    """A hard step as a LightningModule."""

    def __init__(self, name):
        super().__init__()
        self.net, self.step = HARD[name]()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.step(self.net)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(name, *callbacks):
    """Everything that three steps of a Trainer leave behind."""
    torch.manual_seed(0)
    module = Hard(name)
    torch.manual_seed(1)
    batches = DataLoader(torch.zeros(3, 1), 1)
    fit(module, *callbacks, data=(batches, None), max_epochs=1, limit_val_batches=0)
    left = {n: t.detach().clone() for n, t in module.state_dict().items()}
    return left | {f"loss {i}": loss for i, loss in enumerate(module.losses)} | {"rng": torch.get_rng_state()}


WITH_A_LOSS_ALONE = [name for name in HARD if len(HARD[name]()) == 2]


@pytest.mark.parametrize("name", WITH_A_LOSS_ALONE)
def test_in_a_trainer(name):
    want = trained(name)
    found = trained(name, CTDRCallback(rank=None, policy="sqrt", verbose=False))
    assert want.keys() == found.keys()
    differing = [n for n in want if not torch.equal(want[n].nan_to_num(), found[n].nan_to_num())]
    assert differing == []
    assert_nothing_is_installed()
