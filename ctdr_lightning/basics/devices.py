"""Devices by name: sustained rates, least time of an op, memory.

Only the figures of this machine's processor are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ctdr_lightning.basics.cards import CARDS, Card
from ctdr_lightning.basics.errors import ConfigError, meant

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Sustained rates of a device.

    Attributes:
        name: Name in the table and on the command line.
        flops32_per_s: Rate of fp32 arithmetic.
        flops16_per_s: Rate of bf16 and fp16 arithmetic.
        bytes_per_s: Memory bandwidth.
        launch_s: Least time of one op.
        memory_bytes: Memory of the device, as CUDA reports it.
        flops_tf32_per_s: Rate of fp32 arithmetic that is rounded to TF32; 0 where the device has no TF32.
        compute_capability: Major and minor number of an NVIDIA GPU; None for any other device.
        host_s: Time that the host takes to hand over one op; 0 where ops run on the host itself.
        context_bytes: Memory that CUDA's context and its libraries take outside of torch's allocator.
    """

    name: str
    flops32_per_s: float
    flops16_per_s: float
    bytes_per_s: float
    launch_s: float = 4e-6
    memory_bytes: int = 0
    flops_tf32_per_s: float = 0.0
    compute_capability: tuple[int, int] | None = None
    host_s: float = 0.0
    context_bytes: int = 0

    @property
    def is_gpu(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.compute_capability is not None

    @property
    def usable_bytes(self) -> int:
        """Memory for torch's allocator: all but the context's."""
        return self.memory_bytes - self.context_bytes


_G = 2**30
# An eager op takes 5 to 10 us of host; without the module's Python and the optimizer's ops.
_HOST_S = 8e-6
# CUDA's context with the kernels of torch, cuBLAS and cuDNN: 0.4 to 0.6 GiB are reported.
_CONTEXT_BYTES = _G // 2


def _gpu(card: Card) -> DeviceModel:
    fp32, tf32, half = card.rates
    return DeviceModel(
        card.name,
        fp32,
        half,
        card.bytes_per_s,
        memory_bytes=int(card.memory_gib * _G),
        flops_tf32_per_s=tf32,
        compute_capability=card.capability,
        host_s=_HOST_S,
        context_bytes=_CONTEXT_BYTES,
    )


DEVICES = {card.name: _gpu(card) for card in CARDS}


def device_model(name: str | None = None) -> DeviceModel:
    """A device's rates by name; without a name, this machine's processor, measured once.

    Raises:
        ConfigError: If the name is not in the table.
    """
    if name is None or name == "cpu":
        return _measured_processor()
    if name.lower() not in DEVICES:
        near = meant(name.lower().replace(" ", ""), DEVICES)
        raise ConfigError(f"device {name!r} is not in the table.", f"{near}Valid names: cpu, {', '.join(DEVICES)}.")
    return DEVICES[name.lower()]


def model_of(device: torch.device) -> DeviceModel:
    """Rates of a device that is here, with the memory that it has; a GPU not in the table counts as an A100.

    Args:
        device: The device.
    """
    import torch

    if device.type != "cuda":
        return device_model()
    found = torch.cuda.get_device_properties(device)
    return _card_here(found.name, found.total_memory)


@lru_cache
def _card_here(reported: str, memory_bytes: int) -> DeviceModel:
    """The longest name within a reported one, of its rows the nearest in memory: an L40S is no L4."""
    named = [name for name in DEVICES if _plain(name) in _plain(reported)]
    base = max(named, key=len, default="a100")
    rows = [row for name, row in DEVICES.items() if name == base or name.startswith(f"{base}-")]
    return replace(min(rows, key=lambda row: abs(row.memory_bytes - memory_bytes)), memory_bytes=memory_bytes)


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")


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


def product_flops32_per_s(device: DeviceModel, by_cudnn: bool) -> float:
    """Rate of products in fp32 under torch's present settings: rounded to TF32 or not.

    Args:
        device: The device.
        by_cudnn: Whether cuDNN runs them, as it does convolutions and recurrent layers, and not cuBLAS.
    """
    import torch

    if not device.flops_tf32_per_s:
        return device.flops32_per_s
    rounds = torch.backends.cudnn.allow_tf32 if by_cudnn else torch.get_float32_matmul_precision() != "highest"
    return device.flops_tf32_per_s if rounds else device.flops32_per_s


def memory_bytes_here(device: str) -> int | None:
    """All memory of this machine's device of a type.

    Args:
        device: Type of the device, such as ``"cuda"``.

    Returns:
        Bytes; None where the type has no memory of its own or is not here.
    """
    import torch

    return torch.cuda.mem_get_info()[1] if device == "cuda" and torch.cuda.is_available() else None
