"""The GPU's kernels by rule: attention by card, dtype and mask; autocast's lists are those of the installed torch."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.basics.torch_private import FakeTensor
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.recorder import gpu_rules
from ctdr_lightning.memory.recorder.gpu_rules import attention_kernel

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def kernel(gpu, dtype, mask=None, dropout=0.0, causal=False, dim=64, keys=32, heads=4, gqa=False):
    query = torch.empty(2, 4, 32, dim, dtype=dtype, device="meta", requires_grad=True)
    other = torch.empty(2, heads, keys, dim, dtype=dtype, device="meta")
    return attention_kernel(DEVICES[gpu], query, other, other, mask, dropout, causal, gqa)


@pytest.mark.parametrize(
    ("gpu", "dtype", "options", "want"),
    [
        ("a100", HALF, {}, "flash"),
        ("a100", BF16, {"dropout": 0.1, "causal": True}, "flash"),
        ("a100", BF16, {"mask": torch.ones(32, 32, dtype=torch.bool)}, "efficient"),
        ("a100", BF16, {"causal": True, "keys": 48}, "efficient"),  # another meaning of causal than the others'
        ("a100", FULL, {"dropout": 0.1}, "efficient"),  # flash attention knows no fp32
        ("a100", FULL, {"dim": 66}, "math"),  # not a multiple of four
        ("a100", HALF, {"dim": 264}, "efficient"),
        ("a100", DOUBLE, {}, "math"),
        ("a100", HALF, {"heads": 2, "gqa": True}, "flash"),
        ("a100", FULL, {"heads": 2, "gqa": True}, "math"),
        ("rtx3090", HALF, {"dim": 200}, "efficient"),  # the backward of flash attention does not fit the card
        ("a100", HALF, {"dim": 200}, "flash"),
        ("t4", HALF, {}, "efficient"),
        ("t4", BF16, {}, "math"),
        ("v100", FULL, {}, "efficient"),
        ("h100", BF16, {}, "cudnn"),
        ("h100", BF16, {"dim": 256}, "cudnn"),
        ("h100", FULL, {}, "efficient"),
        ("h100", BF16, {"keys": 1}, "flash"),
    ],
)
def test_attention_runs_the_kernel_of_the_card(gpu, dtype, options, want):
    assert kernel(gpu, dtype, **options) == want


def test_a_kernel_that_the_user_turned_off_is_not_chosen():
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert kernel("a100", HALF) == "math"


def listed(macro):
    """The names in one of autocast's lists, as torch's header spells them."""
    (body,) = re.findall(rf"#define {macro}\(_\) (.*?)\n\n", HEADER.read_text(), re.DOTALL)
    found = re.findall(r"_\((\w+)(?:, (\w+))?\)", body.replace("\\", "").replace("\n", " "))
    return {".".join(filter(None, names)) for names in found}


@pytest.mark.parametrize(
    ("macro", "ours", "beside"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", gpu_rules.LOWER, {"cudnn_convolution", "cudnn_convolution_transpose"}),
        ("AT_FORALL_FP32", gpu_rules.FULL, set()),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", gpu_rules.FULL_RESULT, set()),
        ("AT_FORALL_PROMOTE", gpu_rules.WIDEST, set()),
    ],
)
def test_autocasts_lists_are_those_of_this_torch(macro, ours, beside):
    assert set(ours.split()) == listed(macro) | beside


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(16, 32, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0].sum()


def test_a_recurrent_layer_is_one_kernel_with_what_it_keeps():
    trace = record_fake(Lstm(), torch.empty(8, 5, 16), lambda net, x: net(x), device="a100")
    (forward,) = [op for op in trace.ops if op.name == "aten._cudnn_rnn.default"]
    kept = [trace.value_bytes(v) for v in forward.outputs if trace.values[v].dtype == "uint8"]
    assert kept == [8 * 5 * 2 * 32 * 6 * 4]
    assert [op.name for op in trace.ops if op.backward and "cudnn" in op.name] == ["aten._cudnn_rnn_backward.default"]


SEEN = []


class Marked(nn.Module):
    """A step that asks for its device, and that sets autocast itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        SEEN.append((x.device.type, x.is_cuda))
        with torch.autocast(x.device.type, torch.bfloat16):
            return nn.functional.dropout(self.layer(x), 0.1).square().sum()


def test_a_step_sees_the_gpu_and_its_own_autocast_counts():
    SEEN.clear()
    trace = record_fake(Marked(), torch.empty(64, 8), lambda module, x: module(x), device="a100")
    assert SEEN == [("cuda", True)]
    assert trace.device == "cuda"
    made = {op.name: trace.values[op.outputs[0]].dtype for op in trace.ops}
    assert made["aten.addmm.default"] == "bfloat16"
    (dropped,) = [op for op in trace.ops if op.name == "aten.native_dropout.default"]
    assert [trace.value_bytes(v) for v in dropped.outputs] == [64 * 8 * 2, 64 * 8]  # the mask: a byte an element


def test_a_constant_before_all_else_is_no_step_of_the_processor():
    def step(net, x):
        noise = torch.randn(len(x), 8)  # with no device, as a step that was moved to a GPU may make it
        scale = torch.tensor([1.0, 2.0]).to(x.device)
        return (net(x + noise).view(-1, 2) * scale).sum()

    trace = record_fake(nn.Linear(8, 8), torch.empty(64, 8), step, device="a100")
    assert trace.device == "cuda"
    assert trace.seconds < 1e-3


def test_nothing_of_it_is_left_behind():
    clear, attributes = torch.clear_autocast_cache, dict(vars(FakeTensor))
    record_fake(nn.Linear(4, 4), torch.empty(2, 4), lambda net, x: net(x).sum(), device="h100", precision="bf16-mixed")
    assert torch.clear_autocast_cache is clear
    assert dict(vars(FakeTensor)) == attributes
    assert not has_kernel("aten::dropout", "AutogradCUDA")


def test_the_listing_of_kernels_would_show_one():
    assert has_kernel("aten::mm", "AutocastCUDA")
