"""Plans on a GPU: measured peak and time of policies at several budgets, and the largest batch under one budget.

Rows are those of `benchmarks.policies`, with the allocator's peaks and synchronized times. ``--small``, and a machine
without a GPU, runs the same tables on a CPU with small nets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness import Benchmark, table
from benchmarks.nets import Net, gpt2, net_r, transformer, vision
from benchmarks.policies import Row, Way, measured, of_policies, row
from benchmarks.steps import guided, step_peak_bytes
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB
from ctdr_lightning.memory import Budget, Prepared, plan, record

SHARES = (0.7, 0.5, 0.4)
POLICIES = ("sqrt", "capuchin", "dtr", "auto")


@dataclass(frozen=True)
class Largest:
    """The largest batch of a net whose measured peak stays under a budget: plain, and under ``auto``."""

    net: str
    budget_bytes: int
    plain: int
    auto: int


def nets(on_gpu: bool, batch: int) -> dict[str, Callable[[], Net]]:
    """Nets at ImageNet's and a thousand tokens' size; for a CPU small ones."""
    if not on_gpu:
        return {"R": net_r, "T": transformer, "GPT-2 tiny": gpt2}
    return {
        "ResNet-50": partial(vision, "resnet50", batch, 224),
        "ViT-B": partial(vision, "vit_b_16", batch, 224),
        "GPT-2 medium": partial(gpt2, 24, 1024, 16, max(batch // 8, 1), 1024),
    }


def placed(on_gpu: bool, make: Callable[[], Net]) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A net and its step; on a GPU under bf16 autocast."""
    net, inputs, step_of = make()
    if on_gpu:
        net, inputs = net.cuda(), inputs.cuda()

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            return step_of(net, inputs)

    return net, step


def rows_of(name: str, make: Callable[[], Net], on_gpu: bool, rounds: int) -> Iterator[Row]:
    """The plain step, then each policy at each share of its peak."""
    net, step = placed(on_gpu, make)
    plain = Way("plain", lambda: step().backward())
    dynamic_bytes = step_peak_bytes(net, plain.run)
    trace = record(step)
    ways = [plain, *of_policies(Prepared(trace), step, dynamic_bytes, POLICIES, SHARES)]
    found = measured(net, ways, rounds)
    yield from (row(name, way, *of, found[0][0], trace) for way, of in zip(ways, found, strict=True))


def largest(name: str, size: int, budget_bytes: int, on_gpu: bool) -> Largest:
    """Doubles, then bisects."""
    found = {}
    for mode in ("plain", "auto"):
        fits = partial(_fits, mode == "auto", name, size, budget_bytes, on_gpu)
        low, high = 0, 2  # BatchNorm needs more than one value a channel
        while fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        found[mode] = low
    return Largest(name, budget_bytes, **found)


def _fits(planned: bool, name: str, size: int, budget_bytes: int, on_gpu: bool, batch: int) -> bool:
    net, step = placed(on_gpu, partial(vision, name, batch, size))
    try:
        if not planned:
            return step_peak_bytes(net, lambda: step().backward()) <= budget_bytes
        trace = record(step, budget_bytes=budget_bytes)
        made = plan(trace, Budget(peak_bytes=trace.resident_bytes + budget_bytes), "auto")
        return step_peak_bytes(net, guided(step, made)) <= budget_bytes
    except (InfeasibleBudgetError, torch.OutOfMemoryError):
        return False


def figures(
    *, small: bool = False, batch: int = 64, rounds: int = 5, budget_mib: int = 4096
) -> Iterator[Row | Largest]:
    """Every policy on each net, then the largest batches.

    Args:
        small: Small nets, on the CPU.
        batch: Of the nets on a GPU.
        rounds: Behind each time.
        budget_mib: Of the largest batch, on a GPU.
    """
    on_gpu = torch.cuda.is_available() and not small
    for name, make in nets(on_gpu, batch).items():
        yield from rows_of(name, make, on_gpu, rounds)
    yield largest(*(("resnet50", 224, budget_mib * MIB) if on_gpu else ("resnet18", 64, 110 * MIB)), on_gpu)


PEAKS, TIMES = "{peak_mib:.0f} | {peak:.1%} | {predicted_peak:.1%}", "{seconds:x.3f} | {predicted_seconds:x.3f}"
BATCHES = "{net} | {budget_bytes:,} | {plain} | {auto}"
ROWS = "net, policy | budget | peak MiB | peak | predicted | time | predicted"
TABLES = {
    "rows": table(Row, ROWS, f"{{net}}, {{name}} | {{asked:.0%}} | {PEAKS} | {TIMES}"),
    "largest": table(Largest, "largest batch | budget bytes | plain | `auto`", BATCHES),
}
BENCHMARK = Benchmark("gpu", figures, {"rows": Row, "largest": Largest}, TABLES)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
