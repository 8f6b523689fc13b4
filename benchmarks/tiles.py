"""Least peaks with tiles and without outputs: the evaluation's networks at full size, predicted for an A100.

Nothing runs: steps are recorded on fake tensors. *Planned* is the floor of the unchanged step, below which no plan
goes. *Lean* is the smallest of the tried shares of the plain peak that a plan of the leaner step keeps, as the callback
would find it, with the time of that plan. Weights and gradients count; an optimizer does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from benchmarks.harness import Benchmark, table
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import plan, record_fake
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.lean.choice import choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import kept_peak_bytes
from ctdr_recipes.evaluation.nets import FULL
from ctdr_recipes.evaluation.techniques import on_meta

GIB = 2**30
DEVICE = "a100"


@dataclass(frozen=True)
class Row:
    """One network at full size.

    Attributes:
        net: Its name.
        samples: Of the batch.
        plain_bytes: Predicted peak of the plain step.
        planned: The floor of its plans over that peak.
        lean: Smallest of the tried shares of that peak that the leaner step keeps; 1 where none is kept.
        tiles: Modules in tiles times tiles of each; empty where all run whole.
        outputs: Number of layers whose outputs are left out.
        slowdown: Predicted time of the plan at that share over the plain step's.
    """

    net: str
    samples: int
    plain_bytes: int
    planned: float
    lean: float
    tiles: str
    outputs: int
    slowdown: float


def predicted(name: str, shares: Sequence[float]) -> Row:
    """One network."""
    chosen = FULL[name]
    net, batch = on_meta(chosen.build), chosen.batch(chosen.size, "meta")

    def account(lean: LeanStep) -> BatchAccount:
        return BatchAccount(record_fake(net, batch, lean.step(chosen.step), device=DEVICE))

    plain = account(LeanStep())
    peak_bytes = kept_peak_bytes(plain)
    row = Row(name, chosen.size, peak_bytes, plain.floor_bytes / peak_bytes, 1.0, "", 0, 1.0)
    for share in sorted(shares, reverse=True):
        found = _kept(net, account, plain, share, row)
        if found is None:
            break
        row = found
    return row


def _kept(
    net: nn.Module, account: Callable[[LeanStep], BatchAccount], plain: BatchAccount, share: float, row: Row
) -> Row | None:
    """The row at a share of the peak; None where it is not kept."""
    budget_bytes = int(share * row.plain_bytes)
    lean = choose_lean(net, account, budget_bytes, plain=plain)
    try:
        made = plan((lean.account if lean is not None else plain).standing, budget_bytes)
    except InfeasibleBudgetError:
        return None
    step = lean.step if lean is not None else LeanStep()
    tiles = f"{len(step.tiles)} x {max(step.tiles.values())}" if step.tiles else ""
    slowdown = made.seconds / plain.step.seconds
    return replace(row, lean=share, tiles=tiles, outputs=len(step.names or ()), slowdown=slowdown)


def figures(*, nets: Sequence[str] = tuple(FULL), shares: Sequence[float] = (0.6, 0.45, 0.3, 0.2)) -> Iterator[Row]:
    """Every network at the smallest share that it keeps.

    Args:
        nets: Their names.
        shares: Of the plain peak.
    """
    import_torchvision()
    for name in nets:
        yield predicted(name, shares)


def _line(row: Row) -> str:
    kept = f"{row.lean:.2f} | {row.tiles or '-'} | {row.outputs or '-'} | x{row.slowdown:.2f}"
    none = "none of these | - | - | -"
    peak = f"{row.plain_bytes / GIB:.2f} GiB | {row.planned:.2f}"
    return f"{row.net}, batch {row.samples} | {peak} | {kept if row.lean < 1 else none}"


TABLE = table(Row, "network | peak | least planned | kept | modules x tiles | outputs left out | time", _line)
BENCHMARK = Benchmark("tiles", figures, {"rows": Row}, {"table": TABLE}, key=("net",))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
