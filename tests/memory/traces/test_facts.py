"""Facts follow from op, dtype and shape."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ctdr_lightning.memory import Trace, record
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link


def kinds_of(step, shape=(2, 3, 8, 8)):
    """The kinds of every saved value, by the op that made it."""
    x = torch.randn(*shape, requires_grad=True)
    trace = record(lambda: step(x * 1.0).square().mean())
    return {trace.ops[trace.values[v].op].name.split(".")[1]: facts_of(trace)[v] for v in trace.saved}


def test_a_dropout_mask_has_two_values():
    assert "two_valued" in kinds_of(lambda x: F.dropout(x, 0.3))["div_"].kinds


def test_what_was_divided_but_is_no_mask_has_not():
    def step(x):
        y = x.clone()
        return y.div_(2.0) * x

    assert "two_valued" not in kinds_of(step)["div_"].kinds


@pytest.mark.parametrize(("side", "short"), [(8, True), (200, False)])
def test_pooling_indices_are_short_where_the_plane_is_small(side, short):
    found = kinds_of(lambda x: F.max_pool2d(x, 2), (1, 1, side, side))["max_pool2d_with_indices"]
    assert ("index" in found.kinds) is short


def test_other_integers_are_not_indices_of_a_small_plane():
    found = kinds_of(lambda x: x.gather(1, x.argmax(1, keepdim=True)))
    assert "index" not in found["argmax"].kinds


@pytest.mark.parametrize(
    ("step", "alone"),
    [
        (lambda x: F.relu(x), False),  # the square reads it
        (lambda x: F.max_pool2d(F.relu(x), 2), True),
        (lambda x: F.avg_pool2d(F.relu(x), 2), True),
        (lambda x: F.adaptive_avg_pool2d(F.relu(x), 1), True),
        (lambda x: F.relu(x) + x, True),
        (lambda x: F.relu(x) * x, False),
        (lambda x: F.conv2d(F.relu(x), torch.ones(1, 3, 3, 3, requires_grad=True)), False),
        (lambda x: F.hardtanh(x) + x, False),  # its backward looks at both ends
    ],
)
def test_a_relu_is_read_by_its_sign_alone_where_nothing_else_reads_it(step, alone):
    found = [f.kinds for name, f in kinds_of(step).items() if name in ("relu", "hardtanh")]
    assert any("sign_only" in kinds for kinds in found) is alone


def test_a_boolean_is_one():
    assert "bool" in kinds_of(lambda x: x.masked_fill(x.relu() > 0.5, 0.0) * x)["gt"].kinds


def test_views_inputs_and_what_is_overwritten_cannot_be_moved():
    x = torch.randn(4, 4, requires_grad=True)

    def step():
        y = x * 2
        part = y[1:] * y[:-1]
        z = part.exp()
        with torch.no_grad():
            z.data.mul_(1.0)
        return (z * z).sum()

    trace = record(step)
    for value, facts in enumerate(facts_of(trace)):
        entry = trace.values[value]
        if entry.op < 0 or not entry.saves or trace.ops[entry.op].backward:
            assert not facts.movable
        until = max((s.released for s in entry.saves), default=-1)
        assert not (facts.movable and entry.overwritten_at < until)


def test_the_result_of_a_collective_cannot_be_moved_before_it_is_there():
    trace = record(lambda: (torch.randn(4, 4, requires_grad=True) * 2).exp().sum())
    made = next(i for i, op in enumerate(trace.ops) if op.name == "aten.exp.default")
    (value,) = trace.ops[made].outputs

    def movable(name):
        ops = [replace(op, name=name) if i == made else op for i, op in enumerate(trace.ops)]
        return facts_of(replace(trace, ops=tuple(ops)))[value].movable

    assert movable("aten.exp.default")
    assert movable("_c10d_functional.wait_tensor.default")
    assert not movable("_c10d_functional.all_reduce.default")


def test_the_machine_round_trips_with_the_trace():
    net = nn.Linear(2, 2)
    trace = record(lambda: net(torch.ones(1, 2)).sum())
    there = trace.with_machine([Link("disk", 1e9, 2e9, granule=4096)], [CodecCost("bits", True, "bool", 1.0)])
    assert Trace.from_json(there.to_json()) == there
    faster = there.with_machine([Link("disk", 5e9, 5e9)])
    assert [link.out_bytes_per_s for link in faster.links] == [5e9]
    assert faster.codecs == there.codecs
