"""How near to its bound ``auto`` plans, and how long it takes: 20 nets at six budgets, from fake traces.

``python -m benchmarks.planner [--nets tuned | held-out | NAME ...] [--shares 0.8 ...] [--traces FOLDER]``. One row a
net and share of the plain peak above weights: seconds over the plain step, the gap to the lower bound, the fastest
other policy, and seconds of planning (process time, one thread, the bound included). ``floor`` is a proof that nothing
fits; ``none`` means that nothing was found. ``--lengths 60`` plans a transformer for so many sequence lengths instead.
Recorded traces are kept in a folder, so that a second run need not record.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.nets import Attention
from benchmarks.planner_nets import HELD_OUT, NETS, TUNED
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Plan, Prepared, Trace, plan, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.many_shapes import ManyShapes

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
AHEAD = 1e-3


@dataclass(frozen=True)
class Row:
    """One net at one budget; slowdowns are over the plain step, infinite where nothing fits."""

    net: str
    n_ops: int
    share: float
    slowdown: float
    gap: float
    rival: str
    rival_slowdown: float
    plan_s: float
    proven: bool

    def __str__(self) -> str:
        fits = self.slowdown < float("inf")
        found = f"x{self.slowdown:.4f} {self.gap:7.2%}" if fits else f"{'floor' if self.proven else 'none':>15s}"
        rival = f"{self.rival} x{self.rival_slowdown:.4f}" if self.rival else ""
        return f"{self.net:16s} {self.n_ops:6d} {self.share:6.2f} {found} {self.plan_s:8.2f}  {rival}"


def trace_of(name: str, folder: Path) -> Trace:
    """A net's trace, recorded once."""
    path = folder / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
    if not path.exists():
        record_fake(*NETS[name](), device="a100").to_json(path)
    return Trace.from_json(path)


def planned(step: Prepared, limit: int, policy: str) -> Plan | None:
    """A policy's plan; None where it has none."""
    try:
        return plan(step, Budget(peak_bytes=limit), policy)
    except InfeasibleBudgetError:
        return None


def measure(name: str, trace: Trace, share: float, *, rivals: bool) -> Row:
    """Plan one net at one share, and ask every other policy."""
    start = time.process_time()
    step = Prepared(trace)
    limit = trace.resident_bytes + int(share * (step.plain_peak_bytes - trace.resident_bytes))
    made = planned(step, limit, "auto")
    plan_s = time.process_time() - start
    others: dict[str, float] = {}
    for policy, facts in POLICIES.items() if rivals else ():
        other = None if facts.asks_others or facts.clocked else planned(step, limit, policy)
        if other is not None:
            others[policy] = other.seconds / trace.seconds
    best = min(others, key=lambda policy: others[policy], default="")
    slowdown, gap = (made.seconds / trace.seconds, made.gap) if made is not None else (float("inf"), float("inf"))
    proven = floor_bytes(step) > limit
    return Row(name, len(trace.ops), share, slowdown, gap, best, others.get(best, float("inf")), plan_s, proven)


def summary(rows: Sequence[Row]) -> None:
    gaps = sorted(row.gap for row in rows if row.slowdown < float("inf"))
    if gaps:
        share = sum(gap < 0.01 for gap in gaps) / len(gaps)
        print(f"{len(gaps)} rows fit: median gap {median(gaps):.2%}, {share:.0%} under 1 %, largest {gaps[-1]:.2%}")
    ahead = [row for row in rows if row.rival_slowdown < row.slowdown * (1 - AHEAD)]
    open_rows = [row for row in rows if row.slowdown == float("inf") and not row.proven]
    print(f"another policy is ahead in {len(ahead)} rows; nothing found and nothing proven in {len(open_rows)}")
    print(
        f"planning: longest {max(row.plan_s for row in rows):.1f} s, median {median(row.plan_s for row in rows):.2f} s"
    )


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
    summary(rows)


if __name__ == "__main__":
    main()
