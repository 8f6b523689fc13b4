"""The tensor engine against the allocator, against torch's checkpoint, and against plain dispatch.

``python -m benchmarks.engine`` makes three tables: simulated against measured peaks (real and fake traces), our tape
against ``torch.utils.checkpoint`` at the same boundaries, and the cost of recording and guided execution in
microseconds an op.

``FOLDER/engine.json`` keeps the figures; `benchmarks.documents` makes tables of a committed copy of it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import NETS, net_r, net_t, vision
from benchmarks.peak import step_peak_bytes
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
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.recorder.recorder import Recorder
from ctdr_lightning.memory.tape.online import Evictor

MIB = 2**20


@dataclass(frozen=True)
class Peaks:
    """Simulated over measured peaks of one net's step, above weights and inputs.

    Attributes:
        net: Its name.
        n_ops: Ops of the step.
        plain_bytes: Simulated peak of the plain step.
        keep: The plan that keeps everything.
        sqrt: The policy of that name.
        least: The least of random plans.
        most: The most of random plans.
        fake: Simulated peak of a trace of fake tensors over that of the real trace, plain step.
    """

    net: str
    n_ops: int
    plain_bytes: int
    keep: float
    sqrt: float
    least: float
    most: float
    fake: float


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


def guided(net: nn.Module, step: Callable[[], torch.Tensor], made: Plan) -> Callable[[], None]:
    def run() -> None:
        with Tape(made) as tape:
            loss = step()
        assert not tape.diverged, tape.diverged
        loss.backward()

    return run


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
        ratios = [(p.peak_bytes - trace.resident_bytes) / step_peak_bytes(net, guided(net, step, p)) for p in plans]
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
        "T": (net_t, [str(i) for i in range(4)]),
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
            ours = step_peak_bytes(net, guided(net, step, kept))
            checkpoint_segments(net, segments)
            yield Boundaries(name, size, ours / plain, step_peak_bytes(net, backward_of(step)) / plain)


class Nothing(TorchDispatchMode):
    """A dispatch mode that does nothing: the least that seeing every op costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def costs(repeats: int) -> Iterator[Cost]:
    """What each mode adds to plain eager: the least of some runs, plain and seen ones in turns."""
    net = nn.Sequential(*[m for _ in range(100) for m in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))])
    x = torch.randn(2, 8)
    trace = record(lambda: net(x).sum())
    drop = Plan("drop", simulate(trace, dict.fromkeys(trace.saved, RECOMPUTE)))
    some = plan(trace, policy="sqrt")
    rows: dict[str, tuple[Callable[[], Any], bool]] = {
        "a dispatch mode that does nothing": (Nothing, False),
        "guided, everything dropped": (lambda: Tape(drop), False),
        "guided, `sqrt`": (lambda: Tape(some), False),
        "recording": (Recorder, True),
        "recording with online eviction": (lambda: Recorder(evictor=Evictor(10**12)), True),
    }
    for name, (make, backward) in rows.items():
        runs = [(_seconds(net, x, None, backward), _seconds(net, x, make(), backward)) for _ in range(repeats)]
        plain, seen = map(min, zip(*runs, strict=True))
        n_ops = len(trace.ops if backward else trace.forward_ops)
        yield Cost(name, (seen - plain) / n_ops * 1e6)


def _seconds(net: nn.Module, x: torch.Tensor, context: Any, backward: bool) -> float:
    start = thread_time()
    if context is not None:
        context.__enter__()
    loss = net(x).sum()
    if backward:
        loss.backward()
    if context is not None:
        context.__exit__(None, None, None)
    seconds = thread_time() - start
    net.zero_grad(set_to_none=True)
    return seconds


def table(text: str, part: str) -> str:
    """One part of an ``engine.json`` as a Markdown table: ``peaks``, ``boundaries`` or ``costs``."""
    head, kind, cells = _TABLES[part]
    return markdown(text, [head, *map(cells, rows_of(text, part, kind))])


def _peaks(row: Peaks) -> list[str]:
    random_plans = f"{row.least:.4f} to {row.most:.4f}"
    plain = f"{row.plain_bytes / MIB:.1f}"
    return [row.net, f"{row.n_ops:,}", plain, f"{row.keep:.4f}", f"{row.sqrt:.4f}", random_plans, f"{row.fake:.4f}"]


def _boundaries(row: Boundaries) -> list[str]:
    return [row.net, str(row.n_blocks), f"{row.ours:.3f}", f"{row.theirs:.3f}"]


def _cost(row: Cost) -> list[str]:
    return [row.name, f"{row.us_per_op:.1f}"]


_TABLES: dict[str, tuple[list[str], type, Callable[[Any], list[str]]]] = {
    "peaks": (["net", "ops", "plain MiB", "keep", "`sqrt`", "random plans", "fake / real"], Peaks, _peaks),
    "boundaries": (["net", "blocks a segment", "ours", "torch's checkpoint"], Boundaries, _boundaries),
    "costs": (["", "µs an op over plain eager"], Cost, _cost),
}


def main() -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=10, help="random plans a net")
    parser.add_argument("--repeats", type=int, default=30, help="runs behind each cost")
    parser.add_argument("--folder", type=Path, default=Path("outputs/engine"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = {"costs": costs(options.repeats), "boundaries": boundaries(), "peaks": prediction(options.random)}
    found: dict[str, list[Any]] = {part: [] for part in made}
    path = options.folder / "engine.json"
    for part, rows in made.items():
        found[part] = list(rows)
        write_figures(path, **found)
        print(table(path.read_text(), part), flush=True)


if __name__ == "__main__":
    main()
