import pytest
import torch

from ctdr_lightning.basics.devices import DEVICES, DeviceModel, device_model
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.recorder.op_seconds import op_seconds

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
