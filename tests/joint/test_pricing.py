"""A candidate's price without a run is what a run takes."""

from dataclasses import replace
from weakref import ref

import pytest
import torch

from ctdr_lightning import Plan, decompose, plan, record
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition import Choices
from ctdr_lightning.joint import pricing
from ctdr_lightning.joint.pricing import Pricer, standing
from ctdr_lightning.joint.twins import twin_of
from ctdr_lightning.memory.holders.optimizer_bytes import optimizer_of, predict_for
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.optimizer import OptimizerBytes
from tests.joint import parts


def states(number):
    """The bytes of an optimizer that keeps so many numbers for each weight."""
    return lambda trained: OptimizerBytes(round(number * sum(p.nbytes for p in trained)))


def priced(step=parts.step, n_states=2.0, beside_bytes=0):
    net, (batch,) = parts.network(), parts.batches(1)
    return net, batch, Pricer(net, step, batch, standing(states(n_states), beside_bytes))


@pytest.mark.parametrize("share", [0.6, 0.25])
def test_bytes_are_those_of_a_real_recording(share):
    net, batch, pricer = priced()
    twin = twin_of(net)
    report = decompose(twin, rank=share, progress=False)
    found = pricer.price(report.choices)
    twin.zero_grad()
    real = record(lambda: parts.step(twin, batch)).with_static(2 * 4 * found.parameters)
    assert [op.name for op in found.trace.ops] == [op.name for op in real.ops]
    assert Simulator(found.trace).peak_bytes == Simulator(real).peak_bytes
    assert found.parameters == sum(p.numel() for p in twin.parameters())


def test_what_stands_beside_the_step_follows_the_candidate():
    net, _, pricer = priced(n_states=0.0, beside_bytes=lambda candidate: sum(p.nbytes for p in candidate.parameters()))
    choices = decompose(twin_of(net), rank=0.25, progress=False).choices
    _, _, alone = priced(n_states=0.0)
    for asked in (Choices({}), choices):
        found = pricer.price(asked)
        assert found.trace.resident_bytes - alone.price(asked).trace.resident_bytes == 4 * found.parameters


def test_a_step_that_needs_data_is_recorded_for_real():
    def step(net, batch):
        assert batch[0].sum().item() < 1e9  # tensors without data have no number to give
        return parts.step(net, batch)

    net, _, pricer = priced(step)
    twin = twin_of(net)
    report = decompose(twin, rank=0.5, progress=False)
    assert Simulator(pricer.price(report.choices).trace).peak_bytes > 0


@pytest.mark.parametrize(("kind", "kept"), [("Adam", 2), ("AdamW", 2), ("SGD", 0), ("RMSprop", 1), ("Adagrad", 1)])
def test_what_an_optimizer_keeps_is_found_out(kind, kept):
    weight = torch.nn.Parameter(torch.zeros(5, 5))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    large, counter = torch.nn.Parameter(torch.zeros(64, 64)), 4 * (kept > 0)  # the steps, as one float32
    assert predict_for(optimizer, [large]).state == kept * large.nbytes + counter
    weight.grad = torch.ones(5, 5)
    optimizer.step()
    assert predict_for(optimizer, [large]).state == kept * large.nbytes + counter


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ConfigError, match="Valid names: sgd"):
        optimizer_of("lion", [])


def test_a_long_step_is_timed_and_recorded_once(monkeypatch):
    runs, batch = [], parts.batches(1)[0]

    def step(net, batch):
        runs.append(net)
        return parts.step(net, batch)

    monkeypatch.setattr(pricing, "_LONG_S", 0.0)
    monkeypatch.setattr(pricing, "_SHORT_S", 0.0)
    net = parts.network()
    pricer = Pricer(net, step, batch, standing(states(2.0), 0))
    assert pricer.is_long
    assert sum(found is net for found in runs) == 1  # recorded, and timed meanwhile
    assert pricer.dense_s == pytest.approx(pricer.dense.seconds)


def test_a_short_step_is_timed_by_the_clock(monkeypatch):
    times = iter((0.02, 0.01, 0.03))
    monkeypatch.setattr(pricing.RealStep, "seconds", lambda _: next(times))
    monkeypatch.setattr(pricing, "_SHORT_S", 0.0)
    pricer = Pricer(parts.network(), parts.step, parts.batches(1)[0], standing(states(2.0), 0))
    assert not pricer.is_long
    assert pricer.dense_s == 0.01


def test_a_dense_step_without_memory_is_recorded_within_what_is_left(monkeypatch):
    recorded, asked, left = pricing.record, [], []

    def record(step, **options):
        if options["budget_bytes"] is None:
            made = torch.zeros(1)
            left.append(ref(made))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert left[0]() is None, "the failed step holds its tensors"
        asked.append(options)
        return recorded(step, **options)

    net, batch, plain = priced()
    least = Simulator(plain.dense).peak_bytes - plain.dense.resident_bytes
    monkeypatch.setattr(pricing, "left_bytes", lambda device: least)
    monkeypatch.setattr(pricing, "record", record)
    pricer = Pricer(net, parts.step, batch, standing(states(2.0), 0))
    assert not pricer.dense_runs
    assert [op.name for op in pricer.dense.ops] == [op.name for op in plain.dense.ops]
    # A GPU short of memory takes kernels with other bits: nobody reads these gradients, so nothing is verified.
    assert {(options["budget_bytes"], options["verify"]) for options in asked} == {(round(0.8 * least), "never")}


def test_a_gpu_waits_for_its_host_as_the_plan_says(monkeypatch):
    _, _, pricer = priced()
    step = replace(pricer.dense, device="cuda")
    made = Plan("sqrt", plan(pricer.dense, policy="sqrt").timeline)
    waiting = replace(made, timeline=replace(made.timeline, trace=step))
    monkeypatch.setattr(pricing, "in_turns", None)  # no step is run to find out
    short = replace(step, ops=tuple(replace(op, seconds=1e-6) for op in step.ops))
    assert waiting.wall_seconds - waiting.seconds == waiting.host_wait_seconds
    assert pricer.seconds(waiting) == waiting.wall_seconds
    assert pricer.tape_s(short) == pytest.approx(49e-6 * len(short.forward_ops))
