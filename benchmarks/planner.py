"""How near to its bound ``auto`` plans, and how long it takes: 20 nets at six budgets, from fake traces.

``python -m benchmarks.planner [--nets tuned | held-out | NAME ...] [--shares 0.8 ...]``. One row a
net and share of the plain peak above weights: seconds over the plain step, the gap to the lower bound, the fastest
other policy (where the gap is so large that one may be ahead), and seconds of planning (process time, one thread, the
bound included). ``floor`` is a proof that nothing
fits; ``none`` means that nothing was found. ``--lengths 60`` plans a transformer for so many sequence lengths instead.
Recorded traces are kept in a folder, so that a second run need not record. ``FOLDER/planner.json`` holds the rows; the
table of ``docs/policies.md`` is made from a committed copy of it.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.figures import write_figures
from benchmarks.nets import Attention
from benchmarks.planner_nets import HELD_OUT, NETS, TUNED
from benchmarks.planner_rows import AHEAD, Row, summary
from ctdr_lightning.basics.errors import CTDRError, InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Prepared, Trace, plan, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.many_shapes import ManyShapes

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)


def trace_of(name: str, folder: Path) -> Trace:
    """A net's trace, recorded once."""
    path = folder / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
    if not path.exists():
        record_fake(*NETS[name](), device="a100").to_json(path)
    return Trace.from_json(path)


def rivals_of(step: Prepared, limit: int) -> dict[str, float]:
    """By policy the seconds of its plan, of all others that can do something here and fit.

    They are asked directly: ``plan`` makes ``auto``'s plan once more for each that finds nothing, to compare with.
    """
    found = {}
    for name, policy in POLICIES.items():
        if policy.asks_others or policy.clocked or not policy.works_on(step.trace):
            continue
        try:
            made = policy(step, Budget(peak_bytes=limit))
        except CTDRError:
            continue  # nothing that fits, or no chain
        if made.peak_bytes <= limit:
            found[name] = made.seconds
    return found


def measure(name: str, trace: Trace, share: float, *, rivals: bool) -> Row:
    """Plan one net at one share, and ask every other policy where one may be ahead: not where the bound is so near."""
    start = time.process_time()
    step = Prepared(trace)
    limit = trace.resident_bytes + int(share * (step.plain_peak_bytes - trace.resident_bytes))
    try:
        made = plan(step, limit)
        slowdown, gap = made.seconds / trace.seconds, made.gap
    except InfeasibleBudgetError:
        slowdown = gap = None
    plan_s = time.process_time() - start
    proven = floor_bytes(step) > limit
    undecided = not proven and (gap is None or gap > AHEAD)
    others = rivals_of(step, limit) if rivals and undecided else {}
    best = min(others, key=lambda policy: others[policy], default="")
    best_slowdown = others[best] / trace.seconds if best else None
    return Row(name, len(trace.ops), share, slowdown, gap, best, best_slowdown, plan_s, proven)


def many_lengths(n_lengths: int) -> None:
    """One transformer at many sequence lengths under one budget: seconds of planning in all, and how it planned."""
    net = nn.Sequential(*[Attention() for _ in range(4)])
    lengths = [int(n) for n in torch.linspace(128, 32, n_lengths)]
    traces = [record_fake(net, torch.randn(8, n, 128), lambda net, x: net(x).sum(), device="a100") for n in lengths]
    limit = traces[0].resident_bytes + int(0.5 * (simulate(traces[0]).peak_bytes - traces[0].resident_bytes))
    shapes = ManyShapes(plan)
    start = time.process_time()
    plans = [shapes(trace, limit) for trace in traces]
    took = time.process_time() - start
    start = time.process_time()
    own = [plan(trace, limit) for trace in traces]
    alone = time.process_time() - start
    worst = max(made.seconds / best.seconds for made, best in zip(plans, own, strict=True)) - 1
    within = all(made.peak_bytes <= limit for made in plans)
    print(f"{n_lengths} lengths: {took:.1f} s of planning, each by itself {alone:.1f} s; {shapes.counts}")
    print(f"all within the budget: {within}; slowest against a plan of its own: {worst:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=["tuned", "held-out"])
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--traces", type=Path, default=Path(tempfile.gettempdir()) / "ctdr_planner_traces")
    parser.add_argument("--folder", type=Path, default=Path("outputs/planner"))
    parser.add_argument("--alone", action="store_true", help="ask no other policy")
    parser.add_argument("--lengths", type=int, default=0)
    options = parser.parse_args()
    if options.lengths:
        many_lengths(options.lengths)
        return
    groups = {"tuned": list(TUNED), "held-out": list(HELD_OUT)}
    options.traces.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"{'net':16s} {'ops':>6s} {'share':>6s} {'time':>7s} {'gap':>7s} {'plan s':>8s}  fastest other")
    for name in [name for given in options.nets for name in groups.get(given, [given])]:
        trace = trace_of(name, options.traces)
        for share in options.shares:
            rows.append(measure(name, trace, share, rivals=not options.alone))
            print(rows[-1], flush=True)
            write_figures(options.folder / "planner.json", rows=rows)
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
