"""The tensor engine against the allocator, against torch's checkpoint, and against plain dispatch.

Four tables: the cost of recording and guided execution in microseconds an op, what verification and fingerprints take,
our tape against ``torch.utils.checkpoint`` at the same boundaries, and simulated against measured peaks (real and fake
traces).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Benchmark, table
from benchmarks.nets import NETS, net_r, transformer, vision
from benchmarks.steps import guided, in_turns, step_peak_bytes
from ctdr_lightning.basics.torch_private import TorchDispatchMode
from ctdr_lightning.memory import (
    KEEP,
    RECOMPUTE,
    RECOMPUTE_EACH,
    Plan,
    Tape,
    Trace,
    plan,
    record,
    record_fake,
    simulate,
)
from ctdr_lightning.memory.recorder.contents import ContentsWatch
from ctdr_lightning.memory.recorder.recorder import Recorder
from ctdr_lightning.memory.simulator.actions import Actions
from ctdr_lightning.memory.tape.online import Evictor

MIB = 2**20


@dataclass(frozen=True)
class Peaks:
    """Simulated over measured peaks of one net's step, above weights and inputs, by plan.

    ``least`` and ``most`` are of random plans; ``fake`` is a fake trace's plain peak over the real one's.
    """

    net: str
    n_ops: int
    plain_bytes: int
    keep: float
    sqrt: float
    least: float
    most: float
    fake: float

    @property
    def plain_mib(self) -> float:
        """``plain_bytes`` in MiB."""
        return self.plain_bytes / MIB


@dataclass(frozen=True)
class Boundaries:
    """Measured peaks over the plain step's where outputs of blocks alone are kept, ``n_blocks`` of them a segment."""

    net: str
    n_blocks: int
    ours: float
    theirs: float


@dataclass(frozen=True)
class Cost:
    """Microseconds an op above plain eager."""

    name: str
    us_per_op: float


@dataclass(frozen=True)
class Verified:
    """Processor time of a recorded step, and of a verified step under ``sqrt``, over those without fingerprints."""

    net: str
    recorded: float
    guided: float


def backward_of(step: Callable[[], torch.Tensor]) -> Callable[[], None]:
    return lambda: step().backward()


def random_actions(trace: Trace, seed: int) -> Actions:
    """Drop a random share of what autograd saved, cached or not."""
    chooser = random.Random(seed)
    share = chooser.random()
    dropped = [v for v in trace.saved if chooser.random() < share]
    return {v: RECOMPUTE if chooser.random() < 0.7 else RECOMPUTE_EACH for v in dropped}


def prediction(n_random: int) -> Iterator[Peaks]:
    """Simulated against measured peaks, net by net."""
    for name, make in NETS.items():
        net, inputs, step_of = make()
        step = partial(step_of, net, inputs)
        step().backward()
        net.zero_grad(set_to_none=True)
        trace = record(step)
        plans = [plan(trace, policy="keep"), plan(trace, policy="sqrt")]
        plans += [Plan("random", simulate(trace, random_actions(trace, seed))) for seed in range(n_random)]
        ratios = [(p.peak_bytes - trace.resident_bytes) / step_peak_bytes(net, guided(step, p)) for p in plans]
        dynamic = plans[0].peak_bytes - trace.resident_bytes
        fake = record_fake(net, inputs, step_of)
        same = (plan(fake, policy="keep").peak_bytes - fake.resident_bytes) / dynamic
        yield Peaks(name, len(trace.ops), dynamic, *ratios[:2], min(ratios[2:]), max(ratios[2:]), same)


def outputs_kept(trace: Trace, segments: list[list[str]]) -> Actions:
    """Actions that keep the segments' outputs alone."""
    actions = dict.fromkeys(trace.saved, RECOMPUTE)
    for blocks in segments:
        inside = [v for v in trace.droppable if any(_within(trace.module_of(v), b) for b in blocks)]
        actions[max(inside, key=lambda v: trace.values[v].op)] = KEEP
    return actions


def _within(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")


def checkpoint_segments(net: nn.Module, segments: list[list[str]]) -> None:
    """Put torch's checkpoint around each segment, in place."""
    for blocks in segments:
        modules = [net.get_submodule(name) for name in blocks]
        forwards = [module.forward for module in modules]
        modules[0].forward = partial(_run_checkpointed, forwards)
        for module in modules[1:]:
            module.forward = lambda x: x


def _run_checkpointed(forwards: list[Any], x: torch.Tensor) -> torch.Tensor:
    def run(y: torch.Tensor) -> torch.Tensor:
        for forward in forwards:
            y = forward(y)
        return y

    return checkpoint(run, x, use_reentrant=False)


def boundaries() -> Iterator[Boundaries]:
    """Our tape and torch's checkpoint that keep the same outputs."""
    stages = [3, 4, 6, 3]
    cases = {
        "R": (net_r, [str(i) for i in range(1, 10)]),
        "T": (transformer, [str(i) for i in range(4)]),
        "ResNet-50": (lambda: vision("resnet50"), [f"layer{i + 1}.{j}" for i in range(4) for j in range(stages[i])]),
    }
    for name, (make, blocks) in cases.items():
        for size in (1, 2, 3):
            segments = [blocks[i : i + size] for i in range(0, len(blocks), size)]
            net, inputs, step_of = make()
            step = partial(step_of, net, inputs)
            trace = record(step)
            kept = Plan("outputs", simulate(trace, outputs_kept(trace, segments)))
            plain = step_peak_bytes(net, backward_of(step))
            ours = step_peak_bytes(net, guided(step, kept))
            checkpoint_segments(net, segments)
            yield Boundaries(name, size, ours / plain, step_peak_bytes(net, backward_of(step)) / plain)


class Nothing(TorchDispatchMode):
    """A dispatch mode that does nothing: the least that seeing every op costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def small_layers() -> tuple[nn.Module, torch.Tensor]:
    """300 layers whose kernels take nothing, and their input."""
    layers = [m for _ in range(100) for m in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))]
    return nn.Sequential(*layers), torch.randn(2, 8)


def costs(repeats: int) -> Iterator[Cost]:
    """The time that each mode adds to plain eager: the least of some runs, plain and seen ones in turns."""
    net, x = small_layers()
    trace = record(lambda: net(x).sum())
    drop = Plan("drop", simulate(trace, dict.fromkeys(trace.saved, RECOMPUTE)))
    some = plan(trace, policy="sqrt")
    rows: dict[str, tuple[Callable[[], Any], bool]] = {
        "a dispatch mode that does nothing": (Nothing, False),
        "guided, everything dropped": (lambda: Tape(drop, verify="never"), False),
        "guided, `sqrt`": (lambda: Tape(some, verify="never"), False),
        "recording": (Recorder, True),
        "recording with online eviction": (lambda: Recorder(evictor=Evictor(10**12)), True),
    }
    for name, (make, backward) in rows.items():
        runs = [[_seconds(net, x, mode, backward) for mode in (nullcontext(), make())] for _ in range(repeats)]
        plain, seen = map(min, zip(*runs, strict=True))
        n_ops = len(trace.ops if backward else trace.forward_ops)
        yield Cost(name, (seen - plain) / n_ops * 1e6)


def _seconds(net: nn.Module, x: torch.Tensor, mode: AbstractContextManager[Any], backward: bool) -> float:
    start_s = thread_time()
    with mode:
        loss = net(x).sum()
        if backward:
            loss.backward()
    seconds = thread_time() - start_s
    net.zero_grad(set_to_none=True)
    return seconds


def verification(repeats: int) -> Iterator[Verified]:
    """The time of fingerprints, on three nets: small kernels, convolutions, attention."""
    tiny = (*small_layers(), lambda net, x: net(x).sum())
    for name, (net, inputs, step) in {"300 small layers": tiny, "R": net_r(), "T": transformer()}.items():
        run = partial(step, net.train(), inputs)
        made = plan(record(run), policy="sqrt")
        runs = [partial(record, run), partial(_without_fingerprints, run)]
        runs += [guided(run, made, verify=verify) for verify in ("always", "never")]
        recorded, without, verified, unverified = (thread_s for _, thread_s in in_turns(runs, repeats))
        yield Verified(name, recorded / without, verified / unverified)


def _without_fingerprints(run: Callable[[], torch.Tensor]) -> None:
    with patch.object(ContentsWatch, "look"), patch.object(ContentsWatch, "look_at_storage"):
        record(run)


def figures(*, random: int = 10, repeats: int = 30) -> Iterator[Peaks | Boundaries | Cost | Verified]:
    """All four tables.

    Args:
        random: Random plans a net.
        repeats: Runs behind each cost.
    """
    yield from costs(repeats)
    yield from verification(repeats)
    yield from boundaries()
    yield from prediction(random)


PARTS = {"costs": Cost, "verification": Verified, "boundaries": Boundaries, "peaks": Peaks}
PEAKS = "{net} | {n_ops:,} | {plain_mib:.1f} | {keep:.4f} | {sqrt:.4f} | {least:.4f} to {most:.4f} | {fake:.4f}"
BLOCKS = "net | blocks a segment | ours | torch's checkpoint"
VERIFIED = "net | recording with fingerprints | a verified step"
TABLES = {
    "peaks": table(Peaks, "net | ops | plain MiB | keep | `sqrt` | random plans | fake / real", PEAKS),
    "boundaries": table(Boundaries, BLOCKS, "{net} | {n_blocks} | {ours:.3f} | {theirs:.3f}"),
    "costs": table(Cost, " | µs an op over plain eager", "{name} | {us_per_op:.1f}"),
    "verification": table(Verified, VERIFIED, "{net} | {recorded:x.2f} | {guided:x.2f}"),
}
BENCHMARK = Benchmark("engine", figures, PARTS, TABLES)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
