"""Operators of other libraries are tried before any call of them is repeated."""

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.values.op_traits import UNPROVEN, pin_reason_of_call, traits
from ctdr_lightning.memory.values.op_trial import OpTrial

LIB = torch.library.Library("trial", "DEF")
CALLS = []


def draws(x):
    return x * torch.rand_like(x)


def counts(x):
    CALLS.append(1)
    return x + len(CALLS)


def writes(x):
    x.detach().numpy()[...] += 1
    return x * 2


def fails_later(x):
    CALLS.append(1)
    if len(CALLS) > 1:
        raise RuntimeError("one call only")
    return x * 2


def declared(name, body):
    LIB.define(f"{name}(Tensor x) -> Tensor")
    LIB.impl(name, body, "CPU")
    return getattr(torch.ops.trial, name).default


REASONS = {
    "random, without saying so": draws,
    "gives other bits on the same inputs": counts,
    "writes to its inputs without declaring it": writes,
    "failed when it was called again (one call only)": fails_later,
    "": lambda x: x * 2,
}


@pytest.mark.parametrize(("reason", "body"), REASONS.items())
def test_an_operator_is_pinned_for_good_or_proven(reason, body):
    CALLS.clear()
    op = declared(f"op_{list(REASONS).index(reason)}", body)
    x = torch.randn(5)
    assert pin_reason_of_call(op, (x,), {}) == UNPROVEN
    trial = OpTrial(op, (x,), {})
    out = op(x)
    state = torch.get_rng_state()
    trial.judge(out)
    assert torch.equal(torch.get_rng_state(), state)  # a second call draws nothing more
    assert pin_reason_of_call(op, (x,), {}) == reason
    assert not traits(op).unproven


def test_a_second_call_takes_place_once_for_each_operator():
    CALLS.clear()

    def body(x):
        CALLS.append(1)
        return x * 2

    op = declared("once", body)
    for _ in range(3):
        trial = OpTrial(op, (torch.ones(3),), {})
        trial.judge(op(torch.ones(3)))
    assert len(CALLS) == 4


def test_an_operator_that_begins_to_draw_is_pinned_then():
    LIB.define("sometimes(Tensor x, float p) -> Tensor")
    LIB.impl("sometimes", lambda x, p: x * (torch.rand_like(x) > p) if p else x * 1, "CPU")
    op, x = torch.ops.trial.sometimes.default, torch.ones(5)
    for p, reason in ((0.0, ""), (0.5, "random, without saying so"), (0.0, "random, without saying so")):
        trial = OpTrial(op, (x, p), {})
        trial.judge(op(x, p))
        assert pin_reason_of_call(op, (x, p), {}) == reason


def test_tensors_without_contents_prove_nothing():
    LIB.define("on_meta(Tensor x) -> Tensor")
    LIB.impl("on_meta", torch.empty_like, "Meta")
    op, x = torch.ops.trial.on_meta.default, torch.ones(5, device="meta")
    trial = OpTrial(op, (x,), {})
    trial.judge(op(x))
    assert pin_reason_of_call(op, (x,), {}) == UNPROVEN


def test_a_proven_operator_on_fake_tensors():
    """Generators are real tensors, which a mode of fake tensors would not compare."""
    op = declared("proven", lambda x: x * 2)
    torch.library.register_fake("trial::proven", torch.empty_like, lib=LIB)
    trial = OpTrial(op, (torch.ones(3),), {})
    trial.judge(op(torch.ones(3)))
    net = nn.Linear(3, 3)
    fake = record_fake(net, torch.ones(2, 3), lambda net, x: net(x).sum() + op(x).sum())
    assert "trial.proven.default" in [found.name for found in fake.ops]
    assert pin_reason_of_call(op, (torch.ones(3),), {}) == ""


def test_torchs_own_operators_say_what_they_draw():
    """Else each of them would have to be watched."""
    silent = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            draws = any(argument.name == "generator" for argument in op._schema.arguments)
            if draws and torch.Tag.nondeterministic_seeded not in op.tags:
                silent.append(str(op))
    assert silent == []
