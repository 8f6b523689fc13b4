"""The promise: the decomposed net under the plan that no budget gives, against the dense net, in one run.

``python -m benchmarks.promise [--rank 0.25] [--rounds 7] [--folder FOLDER]`` on net RN18 with Adam. Peaks are true ones
of a whole step, weights, gradients, Adam's moments and the batch included; times are medians of thread time over rounds
in which all rows take turns. The last row but one is what a person would do by hand: torch's checkpoint around each
block.

``FOLDER/promise.json`` keeps the figures; `benchmarks.documents` makes a table of a committed copy of it.
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import thread_time

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import BasicBlock, net_rn18
from benchmarks.peak import cpu_peak_bytes
from ctdr_lightning import Plan, Tape, decompose, record
from ctdr_lightning.joint.promise import dense_step_seconds, promise
from ctdr_lightning.memory.values.tensors import storage_bytes

MIB = 2**20


@dataclass
class Way:
    """A net with its optimizer, and how its step is run."""

    name: str
    net: nn.Module
    batch: Tensor
    plan: Plan | None = None
    by_hand: bool = False

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)

    def loss(self) -> Tensor:
        """The forward."""
        if not self.by_hand:
            return self.net(self.batch).square().mean()
        x = self.batch
        for layer in self.net:
            x = checkpoint(layer, x, use_reentrant=False) if isinstance(layer, BasicBlock) else layer(x)
        return x.square().mean()

    def step(self) -> None:
        """Forward, backward and Adam's step."""
        self.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if self.plan is None else Tape(self.plan):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()

    def state_bytes(self) -> int:
        """Adam's moments."""
        found = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return storage_bytes(found)

    def peak_bytes(self) -> int:
        """True peak of a step, what is there before it included."""
        self.step()
        self.optimizer.zero_grad(set_to_none=True)
        there = storage_bytes([*self.net.parameters(), *self.net.buffers(), self.batch]) + self.state_bytes()
        return there + cpu_peak_bytes(self.step)


@dataclass(frozen=True)
class Row:
    """One way: its name, true peak and median seconds of a step."""

    name: str
    peak_bytes: int
    seconds: float


def promised(net: nn.Module, batch: Tensor) -> Way:
    """The net under the plan of least peak that takes no longer than the dense net."""
    way = Way("decomposed, the promise", net, batch)
    way.step()
    way.optimizer.zero_grad(set_to_none=True)
    trace = record(way.loss)
    way.plan = promise(trace.with_static(way.state_bytes()), net)
    dense_s = dense_step_seconds(trace, net)
    print(f"recorded step {trace.seconds:.2f} s, dense step by micro-benchmarks {dense_s:.2f} s")
    print(f"predicted: {way.plan.peak_bytes / MIB:.0f} MiB, {way.plan.seconds:.2f} s")
    return way


def seconds(ways: list[Way], rounds: int) -> list[float]:
    """Median seconds of each way's step, all in turns."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, times in zip(ways, taken, strict=True):
            begin = thread_time()
            way.step()
            times.append(thread_time() - begin)
    return [median(times) for times in taken]


def table(text: str) -> str:
    """The figures of a ``promise.json`` as a Markdown table."""
    rows = rows_of(text, "rows", Row)
    dense, lines = rows[0], [["", "peak MiB", "of dense", "step s", "of dense"]]
    for row in rows:
        shares = row.peak_bytes / dense.peak_bytes, row.seconds / dense.seconds
        lines.append(
            [row.name, f"{row.peak_bytes / MIB:.1f}", f"{shares[0]:.2f}", f"{row.seconds:.2f}", f"{shares[1]:.2f}"]
        )
    return markdown(text, lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=float, default=0.25)
    parser.add_argument("--method", default="tucker")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("outputs/promise"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dense, batch, _ = net_rn18()
    small = copy.deepcopy(dense)
    decompose(small, options.rank, options.method, progress=False)
    ways = [
        Way("dense", dense, batch),
        Way("dense, torch checkpoint per block", copy.deepcopy(dense), batch, by_hand=True),
        Way(f"decomposed, {options.method} {options.rank}", copy.deepcopy(small), batch),
        Way("decomposed, torch checkpoint per block", copy.deepcopy(small), batch, by_hand=True),
        promised(small, batch),
    ]
    peaks = [way.peak_bytes() for way in ways]
    times = seconds(ways, options.rounds)
    print(f"{'':40s} {'peak MiB':>8s} {'share':>6s} {'step s':>7s} {'share':>6s}")
    for way, peak, time in zip(ways, peaks, times, strict=True):
        print(f"{way.name:40s} {peak / MIB:8.1f} {peak / peaks[0]:6.3f} {time:7.3f} {time / times[0]:6.3f}")
    rows = [Row(way.name, peak, time) for way, peak, time in zip(ways, peaks, times, strict=True)]
    write_figures(options.folder / "promise.json", rows=rows)


if __name__ == "__main__":
    main()
