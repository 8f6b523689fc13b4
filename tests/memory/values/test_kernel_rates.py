"""Seconds of a GPU's kernels that neither its memory nor its arithmetic limits."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.gpu_parts.cases import LARGE
from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.values.op_seconds import op_seconds

aten = torch.ops.aten
H200, T4 = DEVICES["h200"], DEVICES["t4"]
MEASURED = json.loads((Path(__file__).parents[3] / "docs/data/gpu-h200.json").read_text())["dense"]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def seconds(func, *args, card=H200):
    return op_seconds(card, func, args, {}, func(*args))


def test_a_kernel_of_few_threads_takes_its_own_time_where_memory_is_faster():
    x, w = empty(64, 256, 28, 28, dtype=torch.float32), empty(256, dtype=torch.float32)
    args = (x, w, w, w, w, True, 0.1, 1e-5)
    assert seconds(aten.native_batch_norm.default, *args) == x.numel() / 110e9
    last = (x.to(memory_format=torch.channels_last), *args[1:])
    assert seconds(aten.native_batch_norm.default, *last) < x.numel() / 110e9
    moved = 3 * x.nbytes + 7 * w.nbytes
    assert seconds(aten.native_batch_norm.default, *args, card=T4) == pytest.approx(moved / T4.bytes_per_s, rel=1e-3)


def test_a_copy_between_layouts_takes_as_long_in_16_bits_as_in_32():
    half, full = (empty(4096, 4096, dtype=dtype) for dtype in (torch.half, torch.float))
    plain, strided = ([seconds(aten.clone.default, t) for t in given] for given in ((half, full), (half.t(), full.t())))
    assert strided[0] == strided[1] > plain[1]
    assert plain[1] == pytest.approx(2 * plain[0])


def test_products_whose_rows_begin_at_no_multiples_of_8_are_slow_in_16_bits_alone():
    """Those of a head, its gradient by the states, and by the weight; an odd number of rows changes nothing."""
    for dtype, ratio in ((torch.bfloat16, 5), (torch.float32, 1)):
        times = []
        for words in (50_256, 50_257):
            states, logits = empty(8191, 1024, dtype=dtype), empty(8191, words, dtype=dtype)
            weight = empty(words, 1024, dtype=dtype)
            products = ((states, weight.t()), (logits, weight), (logits.t(), states))
            times.append([seconds(aten.mm.default, *pair) for pair in products])
        assert [odd / even for even, odd in zip(*times, strict=True)] == pytest.approx([ratio] * 3, rel=1e-3)


def test_16_bit_convolutions_are_turned_around_where_channels_come_first():
    def time(layout, dtype):
        image, weight = empty(64, 64, 56, 56, dtype=dtype), empty(64, 64, 1, 1, dtype=dtype)
        args = [t.to(memory_format=layout) for t in (image, weight)]
        taken_s = seconds(aten.convolution.default, *args, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return taken_s, 2 * image.nbytes

    first, moved = time(torch.contiguous_format, torch.bfloat16)
    last, _ = time(torch.channels_last, torch.bfloat16)
    assert first - last == pytest.approx(2 * moved / H200.bytes_per_s, rel=0.01)
    assert len({time(layout, torch.float32)[0] for layout in (torch.contiguous_format, torch.channels_last)}) == 1


@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_take_their_time_a_position(batch_first):
    net = nn.LSTM(32, 32, 2, bidirectional=True, batch_first=batch_first)
    x = torch.randn(4, 50, 32) if batch_first else torch.randn(50, 4, 32)
    found = record_fake(net, x, lambda net, x: net(x)[0].sum(), device=H200).ops
    times = {op.name: op.seconds for op in found if "cudnn_rnn" in op.name}
    for name, each_s in (("aten._cudnn_rnn.default", 20e-6), ("aten._cudnn_rnn_backward.default", 32e-6)):
        assert times[name] == pytest.approx(50 * 2 * 2 * each_s, rel=0.05)  # and the wait for the host


def test_a_view_that_its_schema_calls_a_copy_is_none():
    x = empty(64, 64)
    assert seconds(aten._unsafe_view.default, x, [4096]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['net']}, {row['precision']}")
def test_steps_are_foretold_within_15_percent_of_the_measured_ones(row):
    """But for products in fp32, whose rate in the table of cards is a data sheet's, and low."""
    net, inputs, step = LARGE[row["net"]]()
    found = record_fake(net.train(), inputs, step, device=H200, precision=row["precision"])
    by_products = row["net"].startswith("GPT") and row["precision"] == "32-true"
    assert found.seconds == pytest.approx(row["seconds"], rel=0.28 if by_products else 0.15)
