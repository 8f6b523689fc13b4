"""A GPU's plan is one whose forward the host can keep up with."""

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import Prepared, plan, record_fake, simulate
from ctdr_lightning.memory.many_shapes import ManyShapes
from ctdr_lightning.memory.plans import quiet_forward
from ctdr_lightning.memory.plans.plan import _OP_S, _SEEN_S


class Block(nn.Module):
    """Many short kernels in one module, so that the tape sees all of them or none."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        y = x @ self.weight
        for _ in range(8):
            y = nn.functional.gelu(y) * x
        return x + y.tanh()


def trace(batch):
    net, x = nn.Sequential(*(Block() for _ in range(12))), torch.empty(batch, 64, device="meta")
    return record_fake(net, x, lambda net, x: net(x).square().mean(), device="h200")


def budget_of(step, share):
    return int(step.resident_bytes + share * (simulate(step).peak_bytes - step.resident_bytes))


@pytest.mark.slow
def test_short_kernels_leave_the_end_of_the_forward_to_itself(monkeypatch):
    step = trace(4096)
    budget = budget_of(step, 0.75)
    made = plan(step, budget)
    monkeypatch.setattr(quiet_forward, "SHARES", ())
    unaware = plan(step, budget)
    assert made.wall_seconds < unaware.wall_seconds
    assert made.n_seen < unaware.n_seen
    assert made.peak_bytes <= budget
    assert made.trace == step  # no value is pinned in it
    assert "more for the host" in made.explain()


def test_the_wait_is_the_hosts_time_beyond_the_forwards_kernels():
    step = trace(4096)
    made = plan(step, budget_of(step, 0.75), policy="sqrt")
    forward_s = sum(step.ops[op].seconds for op in step.forward_ops)
    assert made.host_wait_seconds == pytest.approx(_SEEN_S * made.n_seen + _OP_S * len(step.forward_ops) - forward_s)
    assert plan(step).host_wait_seconds == 0  # nothing is dropped, and no op is seen


@pytest.mark.parametrize("elsewhere", [lambda step: replace(step, device="cpu"), lambda step: without_regions(step)])
def test_on_a_processor_and_in_a_compiled_graph_nothing_waits(elsewhere):
    step = elsewhere(trace(4096))
    made = plan(step, budget_of(step, 0.75))
    assert made.host_wait_seconds == 0
    assert "for the host" not in made.explain()


def test_the_beginning_that_is_foretold_to_be_fastest_is_planned_first():
    step = Prepared(trace(4096))
    parts = quiet_forward.beginnings(step)
    assert list(parts)[-1] is step
    waits = list(parts.values())
    assert waits == sorted(waits)
    assert len(waits) > 2
    first, *_, last = parts
    assert quiet_forward.quietest(step, parts, lambda part: 1.0) is first
    assert quiet_forward.quietest(step, parts, lambda part: 1.0 if part is first else 0.0) is not first
    assert quiet_forward.quietest(step, parts, lambda part: 1.0 if part is last else inf) is last
    assert quiet_forward.quietest(step, parts, lambda part: inf) is step  # nothing fits


def test_a_forward_that_keeps_the_device_busy_has_no_beginnings():
    step = Prepared(trace(2**21))
    assert list(quiet_forward.beginnings(step)) == [step]


@pytest.mark.slow
def test_long_kernels_wait_for_nobody():
    step = trace(2**21)
    assert plan(step, budget_of(step, 0.75)).host_wait_seconds == 0


def without_regions(step):
    return replace(step, ops=tuple(replace(op, region=-1) for op in step.ops))


@pytest.mark.slow
def test_other_shapes_take_a_plan_that_spares_the_host_over():
    steps = [trace(rows) for rows in (65536, 65000, 64000)]
    budget = budget_of(steps[0], 0.8)
    shapes = ManyShapes(lambda step, limit: plan(step, limit))
    made = [shapes(step, budget) for step in steps]
    assert shapes.counts["searched"] == 1
    assert len({each.n_seen for each in made}) == 1
