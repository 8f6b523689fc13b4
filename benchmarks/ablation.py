"""CTDR without one of its means, with fixed plans, with each method, and over ranks, limits and batches: predicted.

``means``: CTDR with ranks, then without one means at a time, under a limit. ``fixed``: the decomposed network under
``auto``, under a plan that knows no limit, and with its blocks checkpointed; nothing moves and every output is made.
``methods``: one method of decomposition for all layers that it fits, at the same share of each layer's parameters;
other layers take their usual one. ``surface``: shares of parameters, limits and batches.

As in the evaluation, steps are recorded on fake tensors for an A100 and nothing runs. Peaks count weights, gradients
and Adam's state. Peaks and times are shares of the dense step's. Accuracy is no part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from benchmarks.harness import Benchmark, Line, Table, pivot
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import POLICIES
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.lean.choice import LeanChoice, choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.tiles import found_tiles
from ctdr_lightning.memory.simulator.actions import Recompute
from ctdr_recipes.evaluation.nets import FULL
from ctdr_recipes.evaluation.predicted import WAYS, Variant, in_short
from ctdr_recipes.evaluation.techniques import CHECKPOINTED, LIMITS, Outcome, fastest, on_meta, shapes_at

DEVICE, PRECISION = "a100", "tf32"
RANKS, RECOMPUTATION, HOST, CODECS = "ranks", "recomputation", "the host", "exact codecs"
OUTPUTS, TILES = "outputs left out", "tiles"
LEFT_OUT = ("", RANKS, RECOMPUTATION, HOST, CODECS, OUTPUTS, TILES)
PLANS, ONE_METHOD = ("auto", "sqrt", CHECKPOINTED), ("tucker", "spatial", "svd", "cp", "tt")
MEANS, FIXED, METHODS, SURFACE = "means", "fixed", "methods", "surface"


@dataclass(frozen=True)
class Cell:
    """A step under a limit.

    Attributes:
        net: The network's name.
        part: Its table.
        what: The means that is left out, the plan, or the method; empty for all means.
        share: Of each layer's parameters; 1 for the dense network.
        batch: Over the network's own batch.
        limit: Share of the dense step's peak at the network's own batch.
        parameters: Of the network.
        fits: Whether a plan keeps to the limit.
        peak: Of the fastest plan that does, over the dense peak; of the one of least peak where none does.
        slowdown: Its time a sample, over the dense step's.
        does: Its plan in words.
    """

    net: str
    part: str
    what: str
    share: float
    batch: float
    limit: float
    parameters: int
    fits: bool
    peak: float
    slowdown: float
    does: str


class Lab:
    """The steps of one network.

    Args:
        name: Of the network.
        search_s: Time for each policy's search.
    """

    def __init__(self, name: str, search_s: float) -> None:
        self.name, self.net, self._search_s = name, FULL[name], search_s
        self._model = on_meta(self.net.build)
        plain = self.variant(1.0).plain(self.net.size)[1]
        self._peak_bytes, self._seconds = plain.plain_peak_bytes, plain.trace.seconds

    def variant(self, share: float, method: str = "auto") -> Variant:
        """The network with a share of each layer's parameters."""
        cut = shapes_at(self._model, share, (method, "auto")) if share < 1 else None
        model = structure_of(self._model, cut) if cut is not None else self._model
        return Variant(model, self.net, DEVICE, PRECISION, self._search_s)

    def cell(self, part: str, of: Variant, what: str, share: float, limit: float, batch: float = 1.0) -> Cell:
        """One row of a table."""
        size, limit_bytes = round(batch * self.net.size), int(limit * self._peak_bytes)
        made = _fixed(of, what, limit_bytes) if part == FIXED else _ctdr(of, size, limit_bytes, what)
        peak, slowdown = made.plan.peak_bytes / self._peak_bytes, made.plan.seconds / self._seconds / batch
        return Cell(self.name, part, what, share, batch, limit, of.parameters, made.fits, peak, slowdown, made.means)


def _ctdr(of: Variant, size: int, limit: int, without: str = "") -> Outcome:
    """The fastest plan of all means but one."""
    lean = _lean(of, size, limit, without)
    account = of.plain(size)[0] if lean is None else lean.account
    places = Places.read(None if without == HOST else "host", None, None if without == CODECS else "exact")
    kinds = (
        [name for name in POLICIES if Recompute not in POLICIES[name].uses] if without == RECOMPUTATION else ["auto"]
    )
    found = fastest(places.equip(account.standing, of.device), limit, kinds, of.search_s)
    means = [*([in_short(lean.step)] if lean is not None else []), *([found.means] if found.means else [])]
    return replace(found, means="; ".join(means))


def _lean(of: Variant, size: int, limit: int, without: str) -> LeanChoice | None:
    plain, account = of.plain(size)[0], partial(of.account, size)
    if without != OUTPUTS:
        return choose_lean(of.model, account, limit, plain=plain, tiles=without != TILES)
    if plain.floor_bytes <= limit:
        return None
    found = found_tiles(of.model, account, LeanStep(), limit, "auto", plain)
    return LeanChoice(None, found) if found is not None else None


def _fixed(of: Variant, name: str, limit: int) -> Outcome:
    if name == CHECKPOINTED:
        return WAYS[CHECKPOINTED](of, of.net.size, limit)
    return fastest(of.plain(of.net.size)[1], limit, (name,), of.search_s)


def figures(
    tables: Sequence[str] = (MEANS, FIXED, METHODS, SURFACE),
    *,
    nets: Sequence[str] = tuple(FULL),
    limits: Sequence[float] = (0.45, 0.3),
    share: float = 0.25,
    surfaces: Sequence[str] = ("ResNet-50", "ViT-B/16", "GPT-2"),
    shares: Sequence[float] = (1.0, 0.5, 0.25, 0.125),
    batches: Sequence[float] = (1.0, 2.0),
    search: float = 5.0,
) -> Iterator[Cell]:
    """Each table of each network.

    Args:
        tables: Which.
        nets: Names of those that lose a means, have fixed plans, and take each method.
        limits: Shares of the dense peak; the first is that of fixed plans and of methods.
        share: Of each layer's parameters.
        surfaces: Names of those whose shares, limits and batches vary.
        shares: Their shares of parameters.
        batches: Their batches, over the network's own.
        search: Seconds for each policy's search.
    """
    import_torchvision()
    for name in nets if {*tables} - {SURFACE} else ():
        lab = Lab(name, search)
        dense, cut = lab.variant(1.0), lab.variant(share)
        for limit, what in product(limits, LEFT_OUT if MEANS in tables else ()):
            of, kept = (dense, 1.0) if what == RANKS else (cut, share)
            yield lab.cell(MEANS, of, what, kept, limit)
        for what in PLANS if FIXED in tables else ():
            yield lab.cell(FIXED, cut, what, share, limits[0])
        for what in ONE_METHOD if METHODS in tables else ():
            yield lab.cell(METHODS, lab.variant(share, what), what, share, limits[0])
    for name in surfaces if SURFACE in tables else ():
        lab = Lab(name, search)
        for kept in shares:
            of = lab.variant(kept)
            for batch, limit in product(batches, LIMITS):
                yield lab.cell(SURFACE, of, "", kept, limit, batch)


def _cell(row: Cell) -> str:
    return f"{row.peak:.2f}, x{row.slowdown:.2f}" if row.fits else f"- ({row.peak:.2f}, x{row.slowdown:.2f})"


def _without(row: Cell) -> str:
    return f"without {row.what}" if row.what else "all means"


def _table(part: str, head: str, line: str, column: Line) -> Table:
    return pivot(Cell, head, line, column, _cell, where=lambda row: row.part == part)


TABLES = {
    MEANS: _table(MEANS, "network | limit", "{net} | {limit:.2f}", _without),
    FIXED: _table(FIXED, "network", "{net}", "{what}"),
    METHODS: _table(METHODS, "network", "{net}", "{what}"),
    SURFACE: _table(SURFACE, "network | batch | share of parameters", "{net} | x{batch:g} | {share:g}", "{limit:.2f}"),
}
CHOICES = {"tables": tuple(TABLES), "nets": FULL, "surfaces": FULL}
BENCHMARK = Benchmark(
    "ablation", figures, {"rows": Cell}, TABLES, CHOICES, ("net", "part", "what", "share", "batch", "limit")
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
