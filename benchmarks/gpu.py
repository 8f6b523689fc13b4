"""Plans on a GPU: measured peak and time of every policy at several budgets, and the largest batch under one budget.

``python -m benchmarks.gpu --out gpu.json`` on a machine with a GPU; ``--small`` runs the same tables on a CPU with
small nets. Peaks are the allocator's own (``torch.cuda.max_memory_allocated``; the profiler's events on a CPU), times
are medians (CUDA events on a GPU), one machine and one run for all rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import Net, gpt2, net_r, net_t, vision
from benchmarks.peak import cpu_peak_bytes
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Budget, Plan, Tape, Trace, plan, record

SHARES = (0.7, 0.5, 0.4)
POLICIES = ("sqrt", "capuchin", "dtr", "auto")
MIB = 2**20
Step = Callable[[], Tensor]
Row = dict[str, Any]


def large(batch: int) -> dict[str, Callable[[], Net]]:
    """Nets for a GPU, at ImageNet's and a thousand tokens' size."""
    return {
        "ResNet-50": lambda: vision("resnet50", batch=batch, size=224),
        "ViT-B": lambda: vision("vit_b_16", batch=batch, size=224),
        "GPT-2 medium": lambda: gpt2(layers=24, width=1024, heads=16, batch=max(batch // 8, 1), tokens=1024),
    }


def small(batch: int) -> dict[str, Callable[[], Net]]:
    """Nets for a CPU."""
    return {"R": lambda: net_r(batch), "T": net_t, "GPT-2 tiny": lambda: gpt2(batch=max(batch // 4, 1))}


def on(device: torch.device, make: Callable[[], Net]) -> tuple[nn.Module, Step]:
    """A net and its step on a device; bf16 autocast on a GPU."""
    net, inputs, step_of = make()
    net, inputs = net.to(device), inputs.to(device)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            return step_of(net, inputs)

    return net, step


def run_of(net: nn.Module, step: Step, made: Plan | None) -> Callable[[], None]:
    def run() -> None:
        net.zero_grad(set_to_none=True)
        with Tape(made) if made is not None else nullcontext() as tape:
            loss = step()
        assert tape is None or not tape.diverged, tape.diverged
        loss.backward()

    return run


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Peak of a step above what was live before it."""
    if device.type != "cuda":
        return cpu_peak_bytes(run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = perf_counter()
        run()
        return perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(net: nn.Module, run: Callable[[], None], device: torch.device, repeats: int) -> tuple[int, float]:
    """Peak and median time, after a warm-up."""
    run()
    net.zero_grad(set_to_none=True)
    peak = peak_bytes(run, device)
    net.zero_grad(set_to_none=True)
    return peak, median(seconds(run, device) for _ in range(repeats))


def plans(trace: Trace) -> Iterator[tuple[str, float, Plan | None]]:
    """Each policy at each share of the plain step's peak; None where it says that it cannot."""
    resident = trace.resident_bytes
    plain = plan(trace, policy="keep").peak_bytes - resident
    for share in SHARES:
        for policy in POLICIES:
            try:
                yield policy, share, plan(trace, Budget(peak_bytes=resident + int(share * plain)), policy)
            except InfeasibleBudgetError:
                yield policy, share, None


def table(name: str, make: Callable[[], Net], device: torch.device, repeats: int) -> list[Row]:
    """Measured rows of one net, printed as they come."""
    net, step = on(device, make)
    run_of(net, step, None)()
    net.zero_grad(set_to_none=True)
    trace = record(step)
    plain_peak, plain_s = measure(net, run_of(net, step, None), device, repeats)
    print(f"\n{name}: plain peak {plain_peak / MIB:.0f} MiB, {plain_s * 1e3:.1f} ms, {len(trace.ops)} ops", flush=True)
    rows: list[Row] = [{"net": name, "policy": "plain", "peak_bytes": plain_peak, "seconds": plain_s}]
    for policy, share, made in plans(trace):
        row: Row = {"net": name, "policy": policy, "budget_share": share}
        if made is not None:
            peak, took_s = measure(net, run_of(net, step, made), device, repeats)
            predicted = made.peak_bytes - trace.resident_bytes
            row |= {"peak_bytes": peak, "seconds": took_s, "predicted_bytes": predicted}
            row |= {"peak_share": peak / plain_peak, "slowdown": took_s / plain_s, "prediction": predicted / peak}
            row["simulated_slowdown"] = made.seconds / trace.seconds
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _line(row: Row) -> str:
    head = f"  {row['policy']:10s} budget {row['budget_share']:.0%}"
    if "slowdown" not in row:
        return f"{head}  does not fit"
    memory = f"peak {row['peak_share']:.1%} (predicted / measured {row['prediction']:.3f})"
    return f"{head}  {memory}  time x{row['slowdown']:.3f} (simulated x{row['simulated_slowdown']:.3f})"


def largest_batch(name: str, budget_bytes: int, device: torch.device, size: int) -> Row:
    """The largest batch of a net whose measured step peak stays under a budget: plain, and under ``auto``."""
    found = {"plain": 0, "auto": 0}
    for mode in found:
        batch = 2  # BatchNorm needs more than one value a channel
        while _fits(mode, name, batch, budget_bytes, device, size):
            found[mode] = batch
            batch *= 2
        low, high = found[mode], batch
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if _fits(mode, name, middle, budget_bytes, device, size) else (low, middle)
        found[mode] = low
    print(f"\nlargest {name} batch under {budget_bytes / MIB:.0f} MiB: {found}", flush=True)
    return {"net": name, "budget_bytes": budget_bytes, **found}


def _fits(mode: str, name: str, batch: int, budget_bytes: int, device: torch.device, size: int) -> bool:
    net, step = on(device, lambda: vision(name, batch=batch, size=size))
    try:
        made = None
        if mode == "auto":
            trace = record(step, budget_bytes=budget_bytes)
            made = plan(trace, Budget(peak_bytes=trace.resident_bytes + budget_bytes), "auto")
        run = run_of(net, step, made)
        run()
        net.zero_grad(set_to_none=True)
        return peak_bytes(run, device) <= budget_bytes
    except (InfeasibleBudgetError, torch.OutOfMemoryError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small nets, on the CPU")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-mib", type=int, default=4096, help="budget of the largest-batch search")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small or not torch.cuda.is_available() else "cuda")
    if device.type == "cpu":
        torch.set_num_threads(1)
    nets = small(16) if device.type == "cpu" else large(options.batch)
    rows = [row for name, make in nets.items() for row in table(name, make, device, options.repeats)]
    name, budget, size = ("resnet18", 110, 64) if device.type == "cpu" else ("resnet50", options.budget_mib, 224)
    batches = largest_batch(name, budget * MIB, device, size)
    if options.out is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        found = {"device": name, "torch": torch.__version__, "rows": rows, "largest_batch": batches}
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
