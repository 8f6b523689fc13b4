"""The device's own figures, and the size of a batch."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops

from ctdr_lightning.basics.gpu_memory import begin_interval, highest
from ctdr_lightning.basics.nests import tensors_of
from ctdr_lightning.basics.units import GIB


def peak_flops(trainer: Any) -> float | None:
    """Operations per second that the device's maker promises for the trainer's precision; None where not known."""
    device = trainer.strategy.root_device
    if device.type == "cpu":
        return None
    kinds = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    dtype = next((kind for word, kind in kinds.items() if word in str(trainer.precision)), torch.float32)
    return get_available_flops(device, dtype)


def device_peaks(device: torch.device) -> dict[str, float]:
    """Peak of the CUDA allocator since the last call, in GiB; empty on other devices."""
    if device.type != "cuda":
        return {}
    found = highest(device)
    begin_interval(device)
    return {
        "ctdr/peak_memory_gib": found.allocated_peak / GIB,
        "ctdr/peak_reserved_gib": found.reserved_peak / GIB,
    }


def allocated_peak_bytes(device: torch.device) -> int:
    """Peak of the CUDA allocator since `device_peaks` was last asked; 0 on other devices, which keep no count."""
    return highest(device).allocated_peak if device.type == "cuda" else 0


def batch_size(batch: Any) -> int:
    """Length of the first tensor in a nested batch; 1 where there is none."""
    tensor = next(tensors_of(batch), None)
    return int(tensor.shape[0]) if tensor is not None and tensor.ndim else 1
