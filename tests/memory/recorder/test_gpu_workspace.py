"""Workspaces of a GPU by the model that the module documents."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.memory import record_fake
from ctdr_lightning.memory.recorder.gpu_workspace import beside_the_step, cublas_bytes

IMAGES = torch.empty(8, 16, 20, 20, device="meta")


def temps(layer, x=IMAGES, precision="16-mixed", device="a100"):
    def step(net, batch):
        return net(batch).float().square().sum()

    with torch.device("meta"):
        net = layer()
    trace = record_fake(net, x.requires_grad_(), step, device=device, precision=precision)
    return [op.temp_bytes for op in trace.ops if "convolution" in op.name]


@pytest.mark.parametrize(
    ("layer", "result"),
    [
        (lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1), 8 * 32 * 10 * 10),
        (lambda: nn.ConvTranspose2d(16, 32, 3, stride=2, groups=2), 8 * 32 * 41 * 41),
    ],
)
def test_16_bit_convolutions_in_nchw_are_turned_around(layer, result):
    weight = layer().weight.numel()
    turned = 2 * (IMAGES.numel() + weight + result)
    assert temps(layer) == [turned, turned + 4 * weight]


def test_nhwc_and_fp32_are_taken_as_they_are():
    def last():
        return nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)

    assert temps(last, IMAGES.to(memory_format=torch.channels_last)) == [0, 4 * 32 * 16 * 9]
    assert temps(lambda: nn.Conv2d(16, 32, 3), precision="32-true") == [0, 0]


def test_cublas_has_a_workspace_for_each_of_two_threads(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert cublas_bytes(DEVICES["a100"]) == 2 * (4096 * 2 + 16 * 8) * 1024
    assert cublas_bytes(DEVICES["h100"]) == 2 * 32 * 2**20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_bytes(DEVICES["a100"]) == 2 * 32 * 2**20
    assert "64.0 MiB for cuBLAS, of 79.20 GiB in all" in beside_the_step(DEVICES["a100"])
