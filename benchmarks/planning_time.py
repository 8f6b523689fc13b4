"""Planning time of ``auto``, against the number of ops: ResNets and GPT-2s of growing depth, from fake traces.

Seconds are processor time on one thread, the lower bound's included; no weight of a large net is ever computed with.
``--picture FILE`` draws them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import linear_regression

from benchmarks.harness import Benchmark, table
from benchmarks.nets import Net, gpt2, vision
from ctdr_lightning.memory import Budget, plan, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, lower_bound_seconds

RESNETS = {name: partial(vision, name, 32, 224) for name in map("resnet{}".format, (18, 34, 50, 101, 152))}
GPT2S = {f"gpt2 {n} layers": partial(gpt2, n, 768, 12, 8, 512) for n in (3, 6, 12, 24, 48)}
FAMILIES: dict[str, dict[str, Callable[[], Net]]] = {"ResNet": RESNETS, "GPT-2": GPT2S}


@dataclass(frozen=True)
class Row:
    """One net: its size, and seconds of recording, planning and of the bound alone."""

    family: str
    name: str
    n_ops: int
    record_s: float
    plan_s: float
    bound_s: float
    slowdown: float
    gap: float


def measure(family: str, name: str, make: Callable[[], Net], share: float) -> Row:
    """Record a step, then plan it, with a share of the bytes between the floor of every plan and the plain peak."""
    start = time.process_time()
    trace = record_fake(*make(), device="a100")
    recorded = time.process_time()
    floor = floor_bytes(trace)
    limit = floor + int(share * (simulate(trace).peak_bytes - floor))
    begin = time.process_time()
    made = plan(trace, Budget(peak_bytes=limit))
    planned = time.process_time()
    lower_bound_seconds(trace, limit)
    bound_s = time.process_time() - planned
    slowdown = made.seconds / trace.seconds
    return Row(family, name, len(trace.ops), recorded - start, planned - begin, bound_s, slowdown, made.gap)


def exponent(rows: Sequence[Row]) -> float:
    """Slope of planning time against ops, both on logarithmic axes; 1 is linear."""
    sizes, seconds = zip(*((math.log(row.n_ops), math.log(row.plan_s)) for row in rows), strict=True)
    return linear_regression(sizes, seconds).slope


def draw(found: dict[str, list[Row]], path: Path) -> None:
    """Planning time against ops, one line a family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for family, rows in found.items():
        label = f"{family}: ops to the power {exponent(rows):.2f}"
        axes.loglog([row.n_ops for row in rows], [row.plan_s for row in rows], "o-", label=label)
    axes.set(xlabel="ops of a step", ylabel="planning time (s)", title="auto")
    axes.grid(which="both", color="#e8eaed", linewidth=0.6)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def figures(*, nets: Sequence[str] = (*RESNETS, *GPT2S), share: float = 0.35, picture: str = "") -> Iterator[Row]:
    """Plan each net.

    Args:
        nets: Those of both families.
        share: Of the budget; 0 is the floor of every plan, 1 the plain peak.
        picture: A file to draw.
    """
    found: dict[str, list[Row]] = {}
    for family, makers in FAMILIES.items():
        for name in (name for name in makers if name in nets):
            row = measure(family, name, makers[name], share)
            found.setdefault(family, []).append(row)
            yield row
    for family, rows in found.items():
        if len(rows) > 1:
            print(f"{family}: planning time grows with ops to the power {exponent(rows):.2f}")
    if picture:
        draw(found, Path(picture))


HEAD = "net | ops | seconds | predicted time | at most slower than the fastest possible plan"
TABLE = table(Row, HEAD, "{name} | {n_ops:,} | {plan_s:.1f} | {slowdown:x.3f} | {gap:.1%}")
BENCHMARK = Benchmark("planning_time", figures, {"rows": Row}, {"table": TABLE}, {"nets": (*RESNETS, *GPT2S)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
