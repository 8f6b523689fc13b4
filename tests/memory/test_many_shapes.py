"""One plan for many shapes: within the budget, near a plan of its own, few searches, no trace kept alive."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from benchmarks.nets import Attention
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import plan, record_fake, simulate
from ctdr_lightning.memory.allocator.reserved import runs_within
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.many_shapes import MOST_REMEMBERED, ManyShapes
from ctdr_lightning.memory.search.transfer import structure_of
from ctdr_lightning.memory.simulator.actions import Compress
from ctdr_lightning.memory.traces.machine import CodecCost

NET = torch.nn.Sequential(*[Attention(32) for _ in range(3)])
SIGN = [CodecCost("sign", True, CODECS["sign"].needs, CODECS["sign"].payload_bits, CODECS["sign"].side_bits)]
LENGTHS = (96, 90, 64, 128, 127, 48, 16)


def traced(tokens, batch=4):
    found = record_fake(NET, torch.randn(batch, tokens, 32), lambda net, x: net(x).sum(), device="a100")
    return replace(found, device="cpu")  # so few bytes are less than a GPU's allocator takes at once


def limit_of(trace, share):
    return trace.resident_bytes + int(share * (simulate(trace).peak_bytes - trace.resident_bytes))


def test_lengths_of_one_net_have_one_structure_and_other_nets_another():
    assert structure_of(traced(96)) == structure_of(traced(64))
    assert structure_of(traced(96)) != structure_of(
        record_fake(NET[:2], torch.randn(4, 96, 32), lambda n, x: n(x).sum())
    )


@pytest.mark.slow
def test_every_length_fits_near_a_plan_of_its_own_and_few_are_searched():
    traces = [traced(tokens) for tokens in LENGTHS]
    limit = limit_of(traces[0], 0.6)
    shapes = ManyShapes(plan)
    for trace in traces:
        made, own = shapes(trace, limit), plan(trace, limit)
        assert made.trace is trace
        assert made.peak_bytes == simulate(trace, made).peak_bytes <= limit
        assert made.seconds <= 1.02 * own.seconds
        assert made.bound_seconds <= own.seconds * (1 + 1e-9)
    assert shapes.counts["plain"] == 2
    assert shapes.counts["searched"] <= 2
    assert sum(shapes.counts.values()) == len(LENGTHS)


@pytest.mark.slow
def test_plans_that_compress_are_judged_by_the_plain_step_and_carried_over_only_where_they_are_as_good():
    net = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
    shapes = ManyShapes(plan)

    def step(net, x):
        for layer in net:
            x = x + layer(x).relu()  # only the signs are read again: of the ReLU's output, nothing else is saved
        return x.square().sum()

    made = []
    for rows in (960, 960, 900, 800):
        trace = record_fake(net, torch.randn(rows, 256), step, device="a100").with_machine([], SIGN)
        made.append((shapes(trace, limit_of(trace, 0.8)), plan(trace, limit_of(trace, 0.8))))
    assert all(any(isinstance(d.action, Compress) for d in ours.decisions) for ours, _ in made)
    for ours, own in made:
        assert ours.peak_bytes <= ours.budget_bytes
        assert own.bound_seconds == ours.bound_seconds == ours.trace.seconds <= ours.seconds <= 1.02 * own.seconds
    assert shapes.counts["transferred"] >= 1


@pytest.mark.slow
def test_what_fits_no_plan_is_said_by_the_planner():
    trace = traced(96)
    with pytest.raises(InfeasibleBudgetError, match="least peak"):
        ManyShapes(plan)(trace, trace.resident_bytes + 1)


@pytest.mark.slow
def test_it_remembers_few_plans_and_no_trace():
    shapes = ManyShapes(plan)
    gone = []
    for tokens in range(40, 40 + MOST_REMEMBERED + 4):
        trace = traced(tokens, batch=1)
        shapes(trace, limit_of(trace, 0.7))
        gone.append(weakref.ref(trace))
        del trace
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert shapes.n_remembered == MOST_REMEMBERED


@pytest.mark.parametrize("tokens", [(20480,), (20480, 20000)], ids=["plain", "carried over"])
def test_on_a_gpu_a_plan_is_one_that_the_allocator_serves(tokens):
    """The tensors of the plain step fit, or those of a carried plan, but not with the pieces between them."""
    net = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.Tanh())))
    traces = [record_fake(net, torch.empty(n, 512), lambda net, x: net(x).sum(), device="a100") for n in tokens]
    shapes = ManyShapes(lambda trace, limit: plan(trace, limit))
    for trace in traces:
        limit = simulate(trace).peak_bytes if len(tokens) == 1 else limit_of(trace, 0.8)
        made = shapes(trace, limit)
        assert runs_within(made.trace, made.actions, limit)
    assert not runs_within(traces[0], None, simulate(traces[0]).peak_bytes)
    assert shapes.counts["plain"] == 0


@pytest.mark.slow
def test_where_no_plan_is_served_few_are_searched_all_the_same():
    traces = [replace(traced(tokens), device="cuda") for tokens in LENGTHS]  # the allocator takes 2 MiB at once
    limit = limit_of(traces[0], 0.6)
    shapes = ManyShapes(lambda trace, limit: plan(trace, limit))
    for trace in traces:
        made = shapes(trace, limit)
        assert made.peak_bytes <= limit
        assert not runs_within(trace, made.actions, limit)
    assert shapes.counts["searched"] < len(LENGTHS) / 2
