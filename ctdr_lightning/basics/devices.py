"""Devices by name: sustained rates, least time of an op, memory.

Rates are sustained, not peak: about 60 % of the vendors' figures for arithmetic, 80 % for memory. This machine's
processor is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any

from ctdr_lightning.basics.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Sustained rates of a device.

    Attributes:
        name: What it is called.
        flops32_per_s: Rate of fp32 (TF32 where the device has it) arithmetic.
        flops16_per_s: Rate of bf16 and fp16 arithmetic.
        bytes_per_s: Memory bandwidth.
        launch_s: Least time of one op.
        memory_bytes: Memory of the device.
    """

    name: str
    flops32_per_s: float
    flops16_per_s: float
    bytes_per_s: float
    launch_s: float = 4e-6
    memory_bytes: int = 0


_T, _G = 1e12, 2**30
DEVICES = {
    m.name: m
    for m in (
        DeviceModel("v100", 9 * _T, 65 * _T, 0.75e12, memory_bytes=16 * _G),
        DeviceModel("t4", 5 * _T, 35 * _T, 0.25e12, memory_bytes=16 * _G),
        DeviceModel("rtx3090", 20 * _T, 60 * _T, 0.75e12, memory_bytes=24 * _G),
        DeviceModel("rtx4090", 50 * _T, 100 * _T, 0.8e12, memory_bytes=24 * _G),
        DeviceModel("l4", 30 * _T, 70 * _T, 0.25e12, memory_bytes=24 * _G),
        DeviceModel("a10g", 20 * _T, 45 * _T, 0.48e12, memory_bytes=24 * _G),
        DeviceModel("a100", 90 * _T, 190 * _T, 1.6e12, memory_bytes=80 * _G),
        DeviceModel("h100", 250 * _T, 600 * _T, 2.7e12, memory_bytes=80 * _G),
        DeviceModel("h200", 250 * _T, 600 * _T, 3.9e12, memory_bytes=141 * _G),
    )
}


def device_model(name: str | None = None) -> DeviceModel:
    """A device's rates by name; without a name, this machine's processor, measured once.

    Raises:
        ConfigError: When the name is not in the table.
    """
    if name is None or name == "cpu":
        return _measured_processor()
    if name.lower() not in DEVICES:
        raise ConfigError(f"device {name!r} is not in the table.", f"Valid names: cpu, {', '.join(sorted(DEVICES))}.")
    return DEVICES[name.lower()]


@lru_cache(maxsize=1)
def _measured_processor() -> DeviceModel:
    # torch is imported where a device is asked: the planning half reads this table and knows no torch.
    import torch

    from ctdr_lightning.basics.torch_private import no_dispatch_modes

    with torch.no_grad(), no_dispatch_modes():
        matrix, vector = torch.ones(384, 384), torch.ones(2**22)
        flops = 2 * 384**3 / _best(lambda: matrix @ matrix)
        moved = 2 * vector.nbytes / _best(lambda: vector + 1)
        launch_s = _best(lambda: vector[:1] + 1)
    return DeviceModel("cpu", flops, flops / 2, moved, launch_s)


def _best(call: Any, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def memory_bytes_here(device: str) -> int | None:
    """All memory of this machine's device of a type.

    Args:
        device: Type of the device, such as ``"cuda"``.

    Returns:
        Bytes; None where the type has no memory of its own or is not here.
    """
    import torch

    return torch.cuda.mem_get_info()[1] if device == "cuda" and torch.cuda.is_available() else None
