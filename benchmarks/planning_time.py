"""How long ``auto`` plans, against the number of ops: ResNets and GPT-2s of growing depth, from fake traces.

``python -m benchmarks.planning_time [--share 0.35] [--picture docs/img/planning_time.png] [--folder FOLDER]``. Seconds
are processor time on one thread, the lower bound's included; no weight of a large net is ever computed with.

``FOLDER/planning_time.json`` keeps the figures; `benchmarks.documents` makes a table of a committed copy of it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import Net, gpt2, vision
from ctdr_lightning.evaluate.measure import one_thread
from ctdr_lightning.memory import Budget, plan, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, lower_bound_seconds

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
LAYERS = (3, 6, 12, 24, 48)


@dataclass(frozen=True)
class Row:
    """One net: its size, and what planning it took."""

    family: str
    name: str
    n_ops: int
    record_s: float
    plan_s: float
    bound_s: float
    slowdown: float
    gap: float


def nets() -> list[tuple[str, str, Callable[[], Net]]]:
    """Family, name and maker of each net."""
    images = [("ResNet", name, partial(vision, name, 32, 224)) for name in RESNETS]
    texts = [("GPT-2", f"gpt2 {n} layers", partial(gpt2, n, 768, 12, 8, 512)) for n in LAYERS]
    return [*images, *texts]


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


def exponent(rows: list[Row]) -> float:
    """Slope of planning time against ops, both on logarithmic axes; 1 is linear."""
    points = [(math.log(row.n_ops), math.log(row.plan_s)) for row in rows]
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def table(text: str) -> str:
    """The figures of a ``planning_time.json`` as a Markdown table."""
    lines = [["net", "ops", "seconds", "predicted time", "at most above the best possible"]]
    for row in rows_of(text, "rows", Row):
        lines.append([row.name, f"{row.n_ops:,}", f"{row.plan_s:.1f}", f"x{row.slowdown:.3f}", f"{row.gap:.1%}"])
    return markdown(text, lines)


def draw(rows: list[Row], path: Path) -> None:
    """Planning time against ops, one line a family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for family in dict.fromkeys(row.family for row in rows):
        mine = [row for row in rows if row.family == family]
        label = f"{family}: ops to the power {exponent(mine):.2f}"
        axes.loglog([r.n_ops for r in mine], [r.plan_s for r in mine], "o-", label=label)
    axes.set(xlabel="ops of a step", ylabel="planning time (s)", title="auto")
    axes.grid(which="both", color="#e8eaed", linewidth=0.6)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.35, help="0: the floor of every plan; 1: the plain peak")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("outputs/planning_time"))
    options = parser.parse_args()
    rows = []
    print(f"{'net':16s} {'ops':>6s} {'record s':>9s} {'plan s':>7s} {'bound s':>8s} {'time':>7s} {'gap':>6s}")
    for family, name, make in nets():
        with one_thread():
            row = measure(family, name, make, options.share)
        rows.append(row)
        write_figures(options.folder / "planning_time.json", rows=rows)
        print(
            f"{row.name:16s} {row.n_ops:6d} {row.record_s:9.1f} {row.plan_s:7.2f} {row.bound_s:8.2f} "
            f"x{row.slowdown:.3f} {row.gap:6.1%}",
            flush=True,
        )
    for family in dict.fromkeys(row.family for row in rows):
        power = exponent([row for row in rows if row.family == family])
        print(f"{family}: planning time grows with ops to the power {power:.2f}")
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
