"""Weights that FSDP2 gathers and frees: the storages are resized, which no op tells."""

import pytest
import torch
import torch.distributed.fsdp
from torch.nn import functional as F

from ctdr_lightning.memory import Recorder, plan
from ctdr_lightning.memory.values.live_bytes import PeakMeter


def copy_out(source, weights):
    for weight in weights:
        weight.untyped_storage().resize_(weight.numel() * weight.itemsize)
    sizes = [weight.numel() for weight in weights]
    flat = [weight.view(1, -1) for weight in weights]
    torch.ops.fsdp.split_with_sizes_copy(source.view(1, -1), sizes, dim=1, out=flat)


def free(weights):
    for weight in weights:
        weight.untyped_storage().resize_(0)


def freed(*shapes):
    weights = [torch.empty(shape) for shape in shapes]
    free(weights)
    return weights


def test_gathered_weights_count_until_they_are_freed():
    weights, source = freed(100, 50), torch.ones(150)
    with PeakMeter() as meter:
        for _ in range(2):
            copy_out(source, weights)
            assert meter.live.now == 600
            free(weights[:1])
            assert meter.live.now == 200
            free(weights)
            assert meter.live.now == 0
        other = torch.zeros(10)
    assert (meter.live.peak, meter.live.now) == (600, other.nbytes)


def test_weights_put_together_from_parts_count_as_well():
    (weight,), source = freed((4, 6)), torch.arange(24.0)
    with PeakMeter() as meter:
        parts = torch.empty(24)
        copy_out(source, [parts])
        weight.untyped_storage().resize_(96)
        torch.cat(parts.view(8, 3).chunk(2), dim=1, out=weight)
        assert meter.live.now == 2 * 96
        del parts
        assert meter.live.now == 96
        free([weight])
        assert meter.live.now == 0


def test_an_output_of_anybody_else_is_no_gathered_weight():
    whole, parts = torch.empty(20), [torch.ones(10), torch.zeros(10)]
    with PeakMeter() as meter:
        torch.cat(parts, out=whole)
    assert meter.live.peak == 0


@pytest.mark.parametrize("regathered", [True, False])
def test_a_trace_has_the_times_at_which_weights_are_there(regathered):
    source = torch.randn(64 * 64)
    (weight,) = freed((64, 64))
    x = torch.randn(8, 64, requires_grad=True)

    def step():
        copy_out(source, [weight])
        hidden = F.linear(x.tanh(), weight)
        if regathered:
            free([weight])
        loss = hidden.sigmoid().sum()
        if regathered:
            copy_out(source, [weight])
        loss.backward()
        free([weight])

    with Recorder() as recorder:
        step()
    trace = recorder.trace()
    x.grad = None
    with PeakMeter() as meter:
        step()
    made = plan(trace)
    assert made.peak_bytes - trace.resident_bytes == meter.live.peak
    spans = [storage for storage in trace.storages if storage.n_bytes == weight.numel() * 4 and storage.born >= 0]
    assert len(spans) == 1 + regathered
    names = [trace.ops[trace.values[value].op].name for value in trace.droppable]
    assert "aten.mm.default" in names, "a weight that comes back is not written over"
