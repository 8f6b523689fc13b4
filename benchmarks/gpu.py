"""Plans on a GPU in five parts, each of a few minutes: ``python -m benchmarks.gpu battery peaks``.

``battery``: whether steps under plans leave the plain step's bits. ``peaks``: predicted and measured peaks and times.
``overhead``: the engine's cost where nothing is saved, and torch's own ways beside it. ``offload``: host memory.
``fits``: whole runs of a Trainer on a capped card. Each row is kept in the JSON as soon as it is measured.
``--small``, and a machine without a GPU, runs small nets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu_parts import battery, fits, offload, overhead, peaks
from benchmarks.gpu_parts.battery import Battery
from benchmarks.gpu_parts.fits import Fit, Foretold
from benchmarks.gpu_parts.offload import Moved, Rates
from benchmarks.gpu_parts.overhead import Overhead
from benchmarks.gpu_parts.peaks import Dense, Ops, Planned
from benchmarks.harness import Benchmark, table

PARTS = {
    "battery": battery.rows, "peaks": peaks.rows, "overhead": overhead.rows, "offload": offload.rows,
    "foretell": fits.foretell,
    "fits": fits.rows,
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


TABLES = {
    "battery": table(
        Battery,
        "net | precision | plan | tensors | other bits | largest difference | plain against plain",
        "{net} | {precision} | {way} | {tensors} | {differing} | {worst:.1e} | {noise:.1e}",
    ),
}
KINDS: dict[str, type] = {
    "battery": Battery, "dense": Dense, "ops": Ops, "planned": Planned, "overhead": Overhead, "rates": Rates,
    "moved": Moved, "foretold": Foretold, "fits": Fit,
}  # fmt: skip
BENCHMARK = Benchmark("gpu", figures, KINDS, TABLES, {"parts": tuple(PARTS)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
