"""Plans on a GPU in six parts, each of a few minutes: ``python -m benchmarks.gpu battery peaks``.

``battery``: whether steps under plans leave the plain step's bits. ``peaks``: predicted and measured peaks and times.
``overhead``: the engine's cost where nothing is saved, and torch's own ways beside it. ``offload``: host memory.
``foretell``: the largest batches of a card, without it. ``fits``: whole runs of a Trainer on a capped card. The
JSON has each row at once.
``--small``, and a machine without a GPU, runs small nets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from benchmarks.gpu_parts import battery, fits, offload, overhead, peaks
from benchmarks.gpu_parts.battery import Battery
from benchmarks.gpu_parts.fits import Fit, Foretold
from benchmarks.gpu_parts.offload import Moved, Rates
from benchmarks.gpu_parts.overhead import Overhead
from benchmarks.gpu_parts.peaks import Dense, Ops, Planned
from benchmarks.harness import Benchmark, Figures, table
from ctdr_lightning.basics.units import GIB, MIB

PARTS = {
    "battery": battery.rows, "peaks": peaks.rows, "overhead": overhead.rows, "offload": offload.rows,
    "foretell": fits.foretell, "fits": fits.rows,
}  # fmt: skip


def figures(parts: Sequence[str] = tuple(PARTS), *, small: bool = False) -> Iterator[Any]:
    """The rows of each part.

    Args:
        parts: Which.
        small: Small nets.
    """
    for part in parts:
        needs_card = part != "foretell"
        yield from PARTS[part](small or (needs_card and not torch.cuda.is_available()))


def _battery(found: Figures) -> str:
    """A line a net and precision: steps that ran, and those that left the plain step's bits."""
    lines = []
    for (net, precision), group in groupby(found.rows(Battery), lambda row: (row.net, row.precision)):
        ran = [row for row in group if row.way and not row.trouble]
        equal = sum(not row.differing for row in ran)
        lines.append(f"{net} | {precision} | {len(ran)} | {equal}")
    return found.markdown("net | precision | recorded steps and steps under plans | equal to the bit", lines)


def _dense(row: Dense) -> str:
    """Peaks and times of a plain step, foretold without the card, recorded, and measured."""
    gib = [n / GIB for n in (row.fake_bytes, row.recorded_bytes, row.allocated_bytes)]
    reserved = [n / GIB for n in (row.modelled_reserved_bytes, row.reserved_bytes)]
    ms = [1e3 * s for s in (row.fake_s, row.recorded_s, row.kernels_s, row.seconds)]
    cells = [f"{row.net}, {row.precision}", *(f"{n:.2f}" for n in (*gib, *reserved)), *(f"{n:.1f}" for n in ms)]
    return " | ".join(cells)


def _planned(row: Planned) -> str:
    mib = [f"{n / MIB:,.0f}" for n in (row.predicted_bytes, row.allocated_bytes, row.reserved_bytes)]
    times = [f"x{row.predicted:.3f}", f"x{row.measured:.3f}"]
    return " | ".join([f"{row.net}, {row.precision}, {row.way}", f"{row.asked:.0%}", *mib, *times])


def _fit(row: Fit) -> str:
    ended = "all steps ran" if row.ended else "out of memory"
    batch = f"{row.batch}, foretold" if row.foretold else str(row.batch)
    return f"{row.net}, {row.way} | {batch} | {ended} | {row.allocated_gib:.2f} | {row.reserved_gib:.2f}"


_DENSE = (
    "step | GiB foretold | recorded | measured | reserved, modelled | measured "
    "| ms foretold | recorded | kernels | measured"
)
TABLES = {
    "battery": _battery,
    "dense": table(Dense, _DENSE, _dense),
    "planned": table(
        Planned,
        "step, planned from | budget | MiB predicted | measured | reserved | time predicted | measured",
        _planned,
        lambda row: not row.trouble,
    ),
    "overhead": table(
        Overhead,
        "net | way | ms | over plain | host's microseconds an op more | peak over plain",
        lambda row: (
            f"{row.net} | {row.way} | {1e3 * row.seconds:.1f} | x{row.slowdown:.2f} | "
            f"{row.host_us_per_op:.0f} | {row.peak:.2f}"
        ),
        lambda row: not row.trouble,
    ),
    "rates": table(
        Rates,
        "place | GiB/s away | GiB/s back | latency",
        lambda row: f"{row.link} | {row.out_gib_per_s:.1f} | {row.back_gib_per_s:.1f} | {1e6 * row.latency_s:.0f} us",
    ),
    "moved": table(
        Moved,
        "net | way | budget | MiB away | pinned | predicted peak | measured | time predicted | measured | other bits",
        lambda row: (
            f"{row.net} | {row.way} | {row.asked:.0%} | {row.away_bytes / MIB:,.0f} | "
            f"{row.pinned_bytes / MIB:,.0f} | {row.predicted_bytes / MIB:,.0f} | {row.allocated_bytes / MIB:,.0f} | "
            f"x{row.predicted:.2f} | x{row.measured:.2f} | {row.differing}"
        ),
        lambda row: not row.trouble,
    ),
    "foretold": table(
        Foretold,
        "net | card | batch without a plan | with one | seconds",
        "{net} | {card} | {plain} | {most} | {seconds:.0f}",
    ),
    "fits": table(Fit, "run | batch | end | GiB of tensors | GiB reserved", _fit),
}
KINDS: dict[str, type] = {
    "battery": Battery, "dense": Dense, "ops": Ops, "planned": Planned, "overhead": Overhead, "rates": Rates,
    "moved": Moved, "foretold": Foretold, "fits": Fit,
}  # fmt: skip
BENCHMARK = Benchmark("gpu", figures, KINDS, TABLES, {"parts": tuple(PARTS)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
