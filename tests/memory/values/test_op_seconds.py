from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.devices import DEVICES, DeviceModel, device_model, model_of
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.values.op_seconds import behind_host, op_seconds

aten = torch.ops.aten
MODEL = DeviceModel("toy", flops32_per_s=1e6, flops16_per_s=2e6, bytes_per_s=1e5, launch_s=1e-3)


def seconds(func, *args):
    return op_seconds(MODEL, func, args, {}, func(*args))


def test_the_slower_of_arithmetic_and_memory():
    a = torch.ones(100, 100)
    assert seconds(aten.mm.default, a, a) == pytest.approx(2 * 100**3 / 1e6)
    assert seconds(aten.mm.default, a.bfloat16(), a.bfloat16()) == pytest.approx(2 * 100**3 / 2e6)
    assert seconds(aten.exp.default, a) == pytest.approx(2 * a.nbytes / 1e5)
    assert seconds(aten.exp.default, torch.ones(1)) == MODEL.launch_s
    assert seconds(aten.view.default, a, [10_000]) == 0
    assert seconds(aten.cat.default, [a, a]) == pytest.approx(4 * a.nbytes / 1e5)


def test_devices_by_name():
    assert device_model("H100") is DEVICES["h100"]
    assert all(m.flops16_per_s > m.flops32_per_s > 0 and m.memory_bytes > 2**30 for m in DEVICES.values())
    with pytest.raises(ConfigError, match=r"(?s)'abacus'.*h100"):
        device_model("abacus")


def test_this_processor_is_measured_once():
    model = device_model()
    assert model is device_model("cpu")
    assert model.flops32_per_s > 1e8
    assert model.bytes_per_s > 1e8
    assert 0 < model.launch_s < 1e-2


def test_products_in_fp32_use_tensor_cores_where_torch_may_round():
    card, a = DEVICES["a100"], torch.empty(4096, 4096, device="meta")
    found = {}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        found[precision] = op_seconds(card, aten.mm.default, (a, a), {}, a)
    torch.set_float32_matmul_precision("highest")
    assert found["highest"] == pytest.approx(2 * 4096**3 / 14e12)
    assert found["high"] == pytest.approx(2 * 4096**3 / 90e12)


def test_convolutions_in_fp32_use_tensor_cores_unless_cudnn_may_not_round(monkeypatch):
    card, x, w = (
        DEVICES["a100"],
        torch.empty(64, 256, 28, 28, device="meta"),
        torch.empty(256, 256, 3, 3, device="meta"),
    )
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    rounded = op_seconds(card, aten.convolution.default, args, {}, x)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert op_seconds(card, aten.convolution.default, args, {}, x) == pytest.approx(90 / 14 * rounded)


def test_bf16_has_no_tensor_cores_before_ampere():
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert op_seconds(DEVICES["t4"], aten.mm.default, (a, a), {}, a) == pytest.approx(2 * 4096**3 / 5e12)


def test_batchnorm_reads_its_input_twice():
    card, x, w = DEVICES["l4"], torch.empty(64, 256, 28, 28, device="meta"), torch.empty(256, device="meta")
    args = (x, w, w, w, w, True, 0.1, 1e-5)
    out = aten.native_batch_norm.default(*args)
    small = 7 * w.nbytes
    assert op_seconds(card, aten.native_batch_norm.default, args, {}, out) == pytest.approx(
        (3 * x.nbytes + small) / card.bytes_per_s, rel=1e-3
    )


def test_a_gpu_waits_for_its_host_behind_short_kernels_alone():
    card = DEVICES["a100"]
    short, view, long = 2e-6, 0.0, 1e-3
    assert behind_host(card, [short] * 100)[1:] == pytest.approx([card.host_s] * 99)
    assert behind_host(card, [long, *[view, short] * 20])[1:] == pytest.approx([view, short] * 20)
    assert sum(behind_host(card, [long] * 10)) == pytest.approx(card.host_s + 10 * long)


def test_cards_have_what_cuda_reports_of_them():
    reported = {"a100": 79.2, "h200": 139.4, "t4": 14.6, "l4": 22.0}
    assert {name: round(DEVICES[name].memory_bytes / 2**30, 1) for name in reported} == reported
    assert all(model.memory_bytes - model.usable_bytes == model.context_bytes > 0 for model in DEVICES.values())


def test_products_in_place_count_as_those_out_of_place():
    a = torch.ones(100, 100)
    assert seconds(aten.addmm_.default, a.clone(), a, a) == pytest.approx(2 * 100**3 / 1e6)


def test_torchs_own_loss_in_chunks_is_three_products():
    def step(net, x):
        targets = torch.zeros(256, dtype=torch.long)
        return nn.functional.linear_cross_entropy(x, net.weight, targets, options=nn.LinearCrossEntropyOptions())

    trace = record_fake(nn.Linear(64, 512), torch.empty(256, 64).requires_grad_(), step, device=MODEL)
    loss = max(trace.ops, key=lambda op: op.seconds)
    assert "linear_cross_entropy" in loss.name
    assert loss.seconds == pytest.approx(3 * 2 * 256 * 512 * 64 / MODEL.flops32_per_s)


@pytest.mark.parametrize(
    ("reported", "memory_gib", "name"),
    [
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4070 Ti", 11.7, "rtx4070ti"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx6000ada"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100"),
        ("NVIDIA GB10", 119.7, "a100"),
    ],
)
def test_a_card_that_is_here_has_the_rates_of_its_row_and_its_own_memory(monkeypatch, reported, memory_gib, name):
    properties = SimpleNamespace(name=reported, total_memory=int(memory_gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert model_of(torch.device("cuda")) == replace(DEVICES[name], memory_bytes=properties.total_memory)


def test_sparse_tensors_and_lists_of_weights_have_times():
    """Both ended the recording of a step under a budget on an H100."""
    rows = torch.eye(100).to_sparse()
    assert op_seconds(MODEL, aten.mm.default, (rows, torch.ones(100, 4)), {}, torch.ones(100, 4)) > 0
    weights = [torch.ones(64, 16), torch.ones(64, 16)]
    flatten = aten._cudnn_rnn_flatten_weight.default
    assert op_seconds(MODEL, flatten, (weights, 2, 16, 2, 16, 0, 1, False, False), {}, torch.ones(2048)) > 0
