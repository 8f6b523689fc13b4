"""Nets and their steps on a device in a precision, and how a step is timed there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.nets import Attention, Net, gpt2, net_r, transformer, unet, vision, vit
from benchmarks.steps import Run
from ctdr_lightning.basics.devices import DeviceModel, model_of
from ctdr_lightning.memory.recorder.precision import Precision
from ctdr_lightning.memory.values.live_bytes import PeakMeter

MIXED, FULL = "bf16-mixed", "32-true"


def device() -> torch.device:
    """The GPU, or the processor where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def card() -> DeviceModel | None:
    """The GPU's entry in the table of cards."""
    return model_of(device()) if device().type == "cuda" else None


class Words(nn.Module):
    """A language model of plain modules: embeddings, blocks, dropout, a head of its own."""

    def __init__(self, blocks: int, width: int, tokens: int, words: int = 50_257) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(Attention(width, width // 64) for _ in range(blocks))
        self.drop, self.norm, self.head = nn.Dropout(0.1), nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Shape in ``(N, T)``, out the loss."""
        x = self.drop(self.words(ids) + self.places)
        for block in self.blocks:
            x = self.drop(block(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


def words(blocks: int, width: int, batch: int, tokens: int) -> Net:
    """A GPT with its batch."""
    torch.manual_seed(0)
    return Words(blocks, width, tokens), torch.randint(50_257, (batch, tokens)), lambda net, ids: net(ids)


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers with dropout, cuDNN's on a GPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in ``(N, T, width)``, out the loss."""
        return self.head(self.layers(x)[0]).square().mean()


def recurrent(width: int, batch: int, tokens: int) -> Net:
    """The LSTM with its batch."""
    torch.manual_seed(0)
    return Recurrent(width), torch.randn(batch, tokens, width), lambda net, x: net(x)


class Routed(nn.Module):
    """A mixture of experts: each token goes to the expert that its router picks, so shapes follow from values."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Shape in ``(N, width)``, out the loss."""
        for _ in range(3):
            share, expert = self.router(x).softmax(1).max(1)
            out = torch.zeros_like(x)
            for number, layer in enumerate(self.experts):
                rows = (expert == number).nonzero().squeeze(1)
                out = out.index_add(0, rows, (layer(x[rows]) * share[rows, None]).to(out.dtype))
            x = x + out
        return x.square().mean()


def routed(width: int, batch: int) -> Net:
    """The mixture of experts with its batch."""
    torch.manual_seed(0)
    return Routed(width, 4), torch.randn(batch, width), lambda net, x: net(x)


# Small enough for a battery of many plans, with the kernels of large nets.
SMALL: dict[str, Callable[[], Net]] = {
    "ResNet-50": partial(vision, "resnet50", 16, 128),
    "ViT": partial(vit, 16, 0.1),
    "GPT-2": partial(gpt2, 4, 256, 4, 4, 256),
    "GPT": partial(words, 3, 256, 4, 256),
    "LSTM": partial(recurrent, 256, 16, 64),
    "U-Net": partial(unet, 4, 128, 32),
    "experts": partial(routed, 256, 512),
}
LARGE: dict[str, Callable[[], Net]] = {
    "ResNet-50": partial(vision, "resnet50", 128, 224),
    "GPT-2 medium": partial(words, 24, 1024, 8, 1024),
    "ViT-B/16": partial(vision, "vit_b_16", 64, 224),
    "U-Net": partial(unet, 16, 256, 64),
    "LSTM": partial(recurrent, 1024, 64, 256),
}
# For a machine without a GPU.
TINY: dict[str, Callable[[], Net]] = {
    "R": partial(net_r, 4),
    "T": partial(transformer, 2, 64, 2, 32),
    "GPT": partial(words, 1, 64, 2, 16),
}


@dataclass
class Case:
    """A net on the device in a precision.

    Attributes:
        net: The module.
        inputs: Its batch.
        forward: From both to the loss.
        precision: On this device.
    """

    net: nn.Module
    inputs: Any
    forward: Callable[[nn.Module, Any], Tensor]
    precision: Precision

    def __post_init__(self) -> None:
        self._buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}

    def reset(self) -> None:
        """Back to the buffers at the beginning, without gradients, and to the same seed."""
        self.net.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        for name, buffer in self.net.named_buffers():
            buffer.data = self._buffers[name].clone()  # a buffer may be expanded, so that nothing can be written to it

    def step(self) -> Tensor:
        """The loss."""
        return self.precision.run(self.forward, self.net, self.inputs)

    def plain(self) -> None:
        """Forward and backward."""
        self.step().backward()


@contextmanager
def placed(make: Callable[[], Net], precision: str = MIXED) -> Iterator[Case]:
    """A net on the device, with torch's settings of its precision; all of its memory is given back at the end."""
    net, inputs, forward = make()
    asked = Precision.read(precision, card())
    net, inputs = net.to(device()).train(), inputs.to(device(), asked.dtype_of(inputs))
    case = Case(net.to(asked.true) if asked.true is not None else net, inputs, forward, asked)
    try:
        with asked.settings():
            yield case
    finally:
        case.net, case.inputs = nn.Identity(), None  # who made it may hold the case for longer
        del net, inputs
        emptied()


def emptied() -> None:
    """Give all that is cached back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Cost:
    """Peaks and times of a step that is repeated; bytes are all that is allocated, or reserved, at the peak.

    Attributes:
        allocated_bytes: Most bytes of tensors and workspaces.
        reserved_bytes: Most bytes that the allocator took; 0 on a processor.
        retries: Times that the allocator gave its segments back in the timed steps.
        seconds: Of a step, several back to back.
        host_s: Of the host for a step, which it hands over without waiting.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    seconds: float
    host_s: float


def cost(net: nn.Module, run: Run, rounds: int = 5, warm_up: int = 3) -> Cost:
    """Run a step again and again."""

    def steps(count: int) -> None:
        for _ in range(count):
            net.zero_grad(set_to_none=True)
            run()

    on_gpu = device().type == "cuda"
    emptied()
    steps(warm_up)
    if not on_gpu:
        with PeakMeter() as meter:
            steps(1)
        start = perf_counter()
        steps(rounds)
        seconds = (perf_counter() - start) / rounds
        return Cost(meter.live.peak, 0, 0, seconds, seconds)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    times = []
    for _ in range(2):
        start = perf_counter()
        steps(rounds)
        host_s = perf_counter() - start
        torch.cuda.synchronize()
        times.append((perf_counter() - start, host_s))
    seconds, host_s = min(times)
    found = torch.cuda.memory_stats()
    net.zero_grad(set_to_none=True)
    return Cost(
        found["allocated_bytes.all.peak"],
        found["reserved_bytes.all.peak"],
        found["num_alloc_retries"] - before,
        seconds / rounds,
        host_s / rounds,
    )


def kernel_seconds(net: nn.Module, run: Run) -> float:
    """Time of all kernels of a step by the profiler; 0 on a processor."""
    if device().type != "cuda":
        return 0.0
    net.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def outcome(case: Case, run: Callable[[], None]) -> dict[str, Tensor]:
    """Gradients, buffers and the generator's state after a step from the same buffers and the same seed."""
    case.reset()
    run()
    found = {name: p.grad.clone() for name, p in case.net.named_parameters() if p.grad is not None}
    found |= {name: b.clone() for name, b in case.net.named_buffers()}
    state = torch.cuda.get_rng_state() if device().type == "cuda" else torch.get_rng_state()
    return found | {"generator": state}


def differences(found: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[int, float]:
    """The number of tensors that are not equal to the bit, and the largest relative difference."""
    other = [name for name in want if name not in found or not torch.equal(found[name], want[name])]
    ratios = [
        float((found[n].double() - want[n].double()).norm() / want[n].double().norm().clamp(min=1e-30))
        for n in other
        if n in found and found[n].shape == want[n].shape
    ]
    missing = list(want.keys() ^ found.keys())
    return len(other) + len([n for n in missing if n not in want]), max(ratios, default=0.0) if not missing else 1e9
