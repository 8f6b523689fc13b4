"""Micro-benchmark of one layer, dense against factorized, on the device and in the dtype and memory format it runs in.

Operations do not tell time: a 1 x 1 convolution of few channels can be slower than the 3 x 3 it replaces. Results are
kept for the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.decomposition.layers.factorized import factorized
from ctdr_lightning.decomposition.methods import Ranks
from ctdr_lightning.decomposition.shapes.geometry import Geometry

_ROUNDS = 3
_AT_LEAST_S = 0.005


@dataclass(frozen=True)
class Job:
    """A measurement, and the key under which it is kept."""

    geometry: Geometry
    method: str
    ranks: Ranks
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channels_last: bool


@lru_cache(maxsize=4096)
def step_seconds(job: Job) -> tuple[float, float]:
    """Seconds of a forward and backward, dense and factorized, in turns so that a busy machine slows both alike."""
    forked = torch.random.fork_rng(devices=[job.device] if job.device.type == "cuda" else [])
    with no_dispatch_modes(), forked, torch.enable_grad():  # fake tensors, or a recording around it, would be timed
        dense = _randomised(job.geometry.build(False, job.device, job.dtype))
        if job.channels_last:
            dense.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        small = _randomised(factorized(dense, job.geometry, job.method, job.ranks))
        x = _input(job)
        steps = [_step(dense, x), _step(small, x)]
        repeats = [max(1, int(_AT_LEAST_S / max(_seconds(step, 1, job.device), 1e-6))) for step in steps]
        taken = [[_seconds(s, n, job.device) for s, n in zip(steps, repeats, strict=True)] for _ in range(_ROUNDS)]
    dense_s, small_s = (median(column) for column in zip(*taken, strict=True))
    return dense_s, small_s


def _randomised(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def _input(job: Job) -> Tensor:
    if job.geometry.lookup:
        return torch.randint(job.geometry.in_size, job.shape, device=job.device)
    x = torch.randn(job.shape, dtype=job.dtype, device=job.device)
    return (
        x.contiguous(memory_format=torch.channels_last) if job.channels_last and x.ndim == 4 else x
    ).requires_grad_()


def _step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    inputs = [x] if x.requires_grad else []
    targets = [*inputs, *module.parameters()]

    def step() -> None:
        y = module(x)
        torch.autograd.grad(y, targets, torch.ones_like(y))

    return step


def _seconds(step: Callable[[], None], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(repeats):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start_s) / repeats
