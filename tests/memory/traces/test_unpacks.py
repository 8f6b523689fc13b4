"""What autograd saves, the backward reads: a lazy unpack would have nothing to gain.

DTR's published logs hold tensors that are saved and unpacked but read by no op, which a lazy system never makes again.
In torch 2.13 none of these nets has such a tensor, so the tape unpacks at once and the lower bound counts every unpack.
"""

import pytest
import torch

from ctdr_lightning.memory import record
from tests.memory.policies.nets import CONFORMANCE, bench_of


def unread(trace):
    """Saved values that autograd asks for, but that no op of the backward reads."""
    read = {value for op in trace.ops if op.backward for value in op.inputs}
    return [v for v in trace.saved if v not in read]


@pytest.mark.parametrize("net", CONFORMANCE)
def test_the_backward_reads_all_that_autograd_saved(net):
    trace = bench_of(net).record()
    assert all(save.unpacked for value in trace.saved for save in trace.values[value].saves)
    assert unread(trace) == []


def test_a_tensor_that_nobody_reads_would_be_seen():
    class Hoarder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 3)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert ctx.saved_tensors
            return grad * 2

    x = torch.ones(4, 4, requires_grad=True)
    assert len(unread(record(lambda: Hoarder.apply(x * 1).sum()))) == 1
