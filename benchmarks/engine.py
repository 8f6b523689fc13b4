"""The tensor engine against the allocator, against torch's checkpoint, and against plain dispatch.

``python -m benchmarks.engine`` prints three tables: simulated against measured peaks (real and fake traces), our tape
against ``torch.utils.checkpoint`` at the same boundaries, and the cost of recording and guided execution in
microseconds an op.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from time import thread_time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def prediction(n_random: int) -> None:
    print(f"simulated / measured peak: keep, sqrt, [least, most] of {n_random} random plans; fake / real trace")
    print(f"{'net':14s} {'ops':>5s} {'plain MiB':>9s}   keep   sqrt   random             fake")
    for name, make in NETS.items():
        net, inputs, step_of = make()
        step = partial(step_of, net, inputs)
        step().backward()
        net.zero_grad(set_to_none=True)
        trace = record(step)
        fake = record_fake(net, inputs, step_of)
        plans = [plan(trace, policy="keep"), plan(trace, policy="sqrt")]
        plans += [Plan("random", simulate(trace, random_actions(trace, seed))) for seed in range(n_random)]
        ratios = [(p.peak_bytes - trace.resident_bytes) / step_peak_bytes(net, guided(net, step, p)) for p in plans]
        shown = f"{ratios[0]:.4f} {ratios[1]:.4f} [{min(ratios[2:]):.4f}, {max(ratios[2:]):.4f}]"
        dynamic = plans[0].peak_bytes - trace.resident_bytes
        same = (plan(fake, policy="keep").peak_bytes - fake.resident_bytes) / dynamic
        print(f"{name:14s} {len(trace.ops):5d} {dynamic / MIB:9.1f}   {shown}   {same:.4f}", flush=True)


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


def boundaries() -> None:
    print("\nonly block outputs kept: measured peak as a share of the plain step's")
    print(f"{'net':10s} {'blocks a segment':>16s} {'ours':>7s} {'torch checkpoint':>17s}")
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
            plain = step_peak_bytes(net, backward_of(step))
            ours = step_peak_bytes(
                net, guided(net, step, Plan("outputs", simulate(trace, outputs_kept(trace, segments))))
            )
            checkpoint_segments(net, segments)
            theirs = step_peak_bytes(net, backward_of(step))
            print(f"{name:10s} {size:16d} {ours / plain:7.4f} {theirs / plain:17.4f}", flush=True)


class Nothing(TorchDispatchMode):
    """A dispatch mode that does nothing: the least that seeing every op costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def cost(repeats: int) -> None:
    net = nn.Sequential(*[m for _ in range(100) for m in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))])
    x = torch.randn(2, 8)
    trace = record(lambda: net(x).sum())
    drop = Plan("drop", simulate(trace, dict.fromkeys(trace.saved, RECOMPUTE)))
    some = plan(trace, policy="sqrt")
    forward, both = len(trace.forward_ops), len(trace.ops)
    rows = {
        "do-nothing mode": (Nothing, False),
        "guided, everything dropped": (lambda: Tape(drop), False),
        "guided, sqrt": (lambda: Tape(some), False),
        "recording": (Recorder, True),
        "recording with online eviction": (lambda: Recorder(evictor=Evictor(10**12)), True),
    }
    print(f"\n{'cost an op over plain eager, least of ' + str(repeats):45s}  us")
    for name, (make, backward) in rows.items():
        plain = min(_seconds(net, x, None, backward) for _ in range(repeats))
        seen = min(_seconds(net, x, make(), backward) for _ in range(repeats))
        print(f"{name:45s} {(seen - plain) / (both if backward else forward) * 1e6:5.1f}", flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=10, help="random plans a net")
    parser.add_argument("--repeats", type=int, default=30, help="runs behind each cost")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prediction(options.random)
    boundaries()
    cost(options.repeats)


if __name__ == "__main__":
    main()
