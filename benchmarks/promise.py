"""The promise: the decomposed net under the plan that no budget gives, against the dense net, in one run.

Net RN18 with Adam. Peaks are true ones of a whole step, weights, gradients, Adam's moments and the batch included;
times are medians of thread time over rounds in which all rows take turns. The last row but one is what a person would
do by hand: torch's checkpoint around each block.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Benchmark, Figures
from benchmarks.nets import BasicBlock, net_rn18
from benchmarks.steps import AdamStep, in_turns
from ctdr_lightning import decompose, record
from ctdr_lightning.joint.promise import dense_step_seconds, promise

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One way: its name, true peak and median seconds of a step."""

    name: str
    peak_bytes: int
    seconds: float


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    """The forward."""
    return net(batch).square().mean()


def by_hand(net: nn.Module, batch: Tensor) -> Tensor:
    """The same with torch's checkpoint around each block."""
    for layer in net:
        batch = checkpoint(layer, batch, use_reentrant=False) if isinstance(layer, BasicBlock) else layer(batch)
    return batch.square().mean()


def promised(net: nn.Module, batch: Tensor) -> AdamStep:
    """The net under the plan of least peak that takes no longer than the dense net."""
    way = AdamStep("decomposed, the promise", net, batch, loss)
    way.step()
    way.optimizer.zero_grad(set_to_none=True)
    trace = record(lambda: loss(net, batch))
    way.plan = promise(trace.with_static(way.state_bytes()), net)
    dense_s = dense_step_seconds(trace, net)
    print(f"recorded step {trace.seconds:.2f} s, dense step by micro-benchmarks {dense_s:.2f} s")
    print(f"predicted: {way.plan.peak_bytes / MIB:.0f} MiB, {way.plan.seconds:.2f} s")
    return way


def figures(*, rank: float = 0.25, method: str = "tucker", rounds: int = 7) -> Iterator[Row]:
    """Every way, the dense net first."""
    dense, batch, _ = net_rn18()
    small = copy.deepcopy(dense)
    decompose(small, rank, method, progress=False)
    cases = {
        "dense": (dense, loss),
        "dense, torch checkpoint per block": (copy.deepcopy(dense), by_hand),
        f"decomposed, {method} {rank}": (copy.deepcopy(small), loss),
        "decomposed, torch checkpoint per block": (copy.deepcopy(small), by_hand),
    }
    ways = [AdamStep(name, net, batch, forward) for name, (net, forward) in cases.items()]
    ways.append(promised(small, batch))
    peaks = [way.peak_bytes() for way in ways]
    times = in_turns([way.step for way in ways], rounds)
    yield from (Row(way.name, peak, time) for way, peak, (_, time) in zip(ways, peaks, times, strict=True))


def _table(found: Figures) -> str:
    rows = found.rows(Row)
    peak, seconds = rows[0].peak_bytes, rows[0].seconds
    lines = [
        f"{row.name} | {row.peak_bytes / MIB:.1f} | {row.peak_bytes / peak:.2f} | {row.seconds:.2f} | "
        f"{row.seconds / seconds:.2f}"
        for row in rows
    ]
    return found.markdown(" | peak MiB | of dense | step s | of dense", lines)


BENCHMARK = Benchmark("promise", figures, {"rows": Row}, {"table": _table})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
