"""Gap to the bound and planning time of ``auto``: 20 nets at six budgets, from fake traces.

One row a net and share of the plain peak above weights: seconds over the plain step, the gap to the lower bound, the
fastest other policy (where the gap is so large that one may be ahead), and seconds of planning (process time, one
thread, the bound included). ``floor`` is a proof that nothing fits; ``none`` means that nothing was found.
``--lengths 60`` plans a transformer for so many sequence lengths instead. Recorded traces are kept in a folder, so that
a second run need not record.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import Benchmark, Figures, pivot
from benchmarks.nets import HELD_OUT, TUNED, transformer
from benchmarks.policies import planned
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Prepared, Trace, plan, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.many_shapes import ManyShapes

NETS = TUNED | HELD_OUT
TRACES = Path(tempfile.gettempdir()) / "ctdr_planner_traces"
# A policy counts as ahead where its plan is faster by more than this share.
AHEAD = 1e-3
SMALL_GAP = 0.01


@dataclass(frozen=True)
class Row:
    """One net at a share of its plain peak above the weights; times are over the plain step, None where nothing fits.

    ``gap`` is the share of the lower bound by which ``auto`` is above it; ``rival`` is the fastest other policy, empty
    where none was asked or none fits. ``proven`` tells that no plan fits.
    """

    net: str
    n_ops: int
    share: float
    slowdown: float | None
    gap: float | None
    rival: str
    rival_slowdown: float | None
    plan_s: float
    proven: bool

    @property
    def ahead(self) -> bool:
        """Whether another policy is ahead."""
        best = float("inf") if self.slowdown is None else self.slowdown
        return self.rival_slowdown is not None and self.rival_slowdown < best * (1 - AHEAD)


def trace_of(name: str, folder: Path) -> Trace:
    """A net's trace, recorded once."""
    path = folder / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        record_fake(*NETS[name](), device="a100").to_json(path)
    return Trace.from_json(path)


def rivals_of(step: Prepared, peak_bytes: int) -> dict[str, float]:
    """By policy the seconds of its plan, of all others that can do something here and fit."""
    able = [name for name, of in POLICIES.items() if name != "auto" and not of.clocked and of.works_on(step.trace)]
    plans = {name: planned(step, peak_bytes, name) for name in able}
    return {name: made.seconds for name, made in plans.items() if made is not None}


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
    others = rivals_of(step, limit - trace.resident_bytes) if rivals and undecided else {}
    best = min(others, key=lambda policy: others[policy], default="")
    best_slowdown = others[best] / trace.seconds if best else None
    return Row(name, len(trace.ops), share, slowdown, gap, best, best_slowdown, plan_s, proven)


def many_lengths(n_lengths: int) -> None:
    """One transformer at many sequence lengths under one budget: seconds of planning in all, and how it planned."""
    lengths = [int(128 - 96 * i / max(n_lengths - 1, 1)) for i in range(n_lengths)]
    traces = [record_fake(*transformer(tokens=n), device="a100") for n in lengths]
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


def figures(
    *,
    nets: Sequence[str] = ("tuned", "held-out"),
    shares: Sequence[float] = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2),
    traces: Path = TRACES,
    alone: bool = False,
    lengths: int = 0,
) -> Iterator[Row]:
    """Every net at every share.

    Args:
        nets: Names, or "tuned" and "held-out".
        shares: Of the plain peak above the weights.
        traces: Where recorded traces are kept.
        alone: Ask no other policy.
        lengths: Plan a transformer for so many sequence lengths instead.
    """
    if lengths:
        many_lengths(lengths)
        return
    groups = {"tuned": list(TUNED), "held-out": list(HELD_OUT)}
    for name in [name for given in nets for name in groups.get(given, [given])]:
        trace = trace_of(name, traces)
        yield from (measure(name, trace, share, rivals=not alone) for share in shares)


def summary(rows: Sequence[Row]) -> list[str]:
    """A summary of the rows, one sentence a line."""
    gaps = sorted(row.gap for row in rows if row.gap is not None)
    small = sum(gap < SMALL_GAP for gap in gaps)
    fitting = [f"Of {len(rows)} rows {sum(row.proven for row in rows)} are proven not to fit"]
    if gaps:
        fitting.append(
            f"{len(gaps)} have a plan: the median gap is {median(gaps):.2%}, {small / len(gaps):.0%} are under "
            f"{SMALL_GAP:.0%}, the largest is {gaps[-1]:.2%}"
        )
    nothing = sum(row.gap is None and not row.proven for row in rows)
    seconds = [row.plan_s for row in rows]
    return [
        "; ".join(fitting) + ".",
        f"Nothing is found and nothing proven in {nothing}.",
        f"Another policy is ahead in {sum(row.ahead for row in rows)}.",
        f"Planning takes {median(seconds):.1f} s in the median and {max(seconds):.1f} s at most.",
    ]


def _gap(row: Row) -> str:
    if row.gap is None:
        return "floor" if row.proven else "none"
    return f"{row.gap:.2%}" + f" ({row.rival} is ahead)" * row.ahead


def _longest(rows: Sequence[Row]) -> str:
    return f"{max(row.plan_s for row in rows):.1f}"


def _sentences(found: Figures) -> str:
    return " ".join(summary(found.rows(Row))) + "\n"


GAPS = pivot(Row, "net (ops)", "{net} ({n_ops:,})", "{share:g}", _gap, right=("longest, s", _longest))
BENCHMARK = Benchmark(
    "planner", figures, {"rows": Row}, {"gaps": GAPS, "summary": _sentences}, {"nets": [*NETS, "tuned", "held-out"]}
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
