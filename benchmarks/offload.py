"""Peaks and times of moved and compressed saved tensors, measured.

``disk``: recomputation, and that and a disk, at shares of the peak. ``codecs``: exact codecs alone, on published nets
with dropout or pooling.

Peaks are the allocator's (the profiler's memory events), plus the disk's staging buffers, which torch does not
allocate. Times are of one process on one thread, plain step and plan in turns: *wall* of the step, and
*processor* of the stepping thread alone. All plans are compared with the plain step to the bit.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Benchmark, table, text_of
from benchmarks.nets import Net, bert, net_r, net_rn18, t5, transformer, vision, vit
from benchmarks.steps import in_turns, keep_freed_memory, step_peak_bytes
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB
from ctdr_lightning.memory import Plan, Tape, plan, record, simulate
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.holders.measure import measure_codecs, measure_links
from ctdr_lightning.memory.search.others import free_codecs

# With three rounds T5's codecs took x.96 in one run and x1.17 in another.
ROUNDS = 7
TEMPORARY = Path(tempfile.gettempdir())
BOTH = "auto, with a disk"


# The nets of the disk's table, and the shares of their peak above the weights that are asked for.
DISK_NETS: dict[str, tuple[Callable[[], Net], tuple[float, ...]]] = {
    "T": (transformer, (0.3,)),
    "R": (net_r, (0.3,)),
    "RN18": (net_rn18, (0.7, 0.5, 0.4)),
    "BIG": (partial(transformer, 5, 256, 32), (0.5, 0.7, 0.4)),
}
CODEC_NETS: dict[str, Callable[[], Net]] = {
    "ViT": partial(vit, 8, 0.1),
    "T5": t5,
    "BERT": bert,
    "GoogLeNet": partial(vision, "googlenet", size=96, aux_logits=False, init_weights=False),
    "VGG-16": partial(vision, "vgg16", 16, 224),  # on fewer or smaller images its gradients set the peak
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Peaks with weights and inputs, times over the plain step's, and whether gradients are equal to the bit.

    ``processor`` is of the stepping thread alone; ``predicted`` stands for simulated.
    """

    plain_bytes: int = 0
    peak_bytes: int = 0
    predicted_bytes: int = 0
    wall: float = 0.0
    processor: float = 0.0
    predicted: float = 0.0
    moved_bytes: int = 0
    equal: bool = True

    @property
    def peak(self) -> float:
        """``peak_bytes`` over the plain step's."""
        return self.peak_bytes / self.plain_bytes

    @property
    def predicted_peak(self) -> float:
        """``predicted_bytes`` over the plain step's measured peak."""
        return self.predicted_bytes / self.plain_bytes

    @property
    def moved_mib(self) -> float:
        """``moved_bytes`` in MiB."""
        return self.moved_bytes / MIB


@dataclass(frozen=True)
class Row(Measured):
    """One plan for a share of the plain peak above the weights; 0 where no budget was given."""

    net: str
    plan: str
    share: float
    fits: bool = True
    resident_bytes: int = 0

    @property
    def above(self) -> float:
        """Peak above weights and inputs, over the plain step's."""
        return (self.peak_bytes - self.resident_bytes) / (self.plain_bytes - self.resident_bytes)


class Case:
    """A net and its step, with the plain step's trace and gradients.

    Args:
        made: The net, its inputs and its step.
        n_rounds: How often each plan is timed.
    """

    def __init__(self, made: Net, n_rounds: int) -> None:
        self.net, self.inputs, self._step = made
        self.n_rounds = n_rounds
        self.net.train()
        self.want = self.run()
        self.net.zero_grad(set_to_none=True)  # or they would be in the recorded step, and be added to
        self.trace = record(lambda: self._step(self.net, self.inputs))
        held = (*self.net.parameters(), *self.net.buffers(), self.inputs)
        # Of the net itself, as the trace also counts constants that a step makes: those of T5 would count twice.
        self.resident_bytes = sum(tensor.nbytes for tensor in held)

    def step(self, made: Plan | None = None, holders: Holders | None = None) -> None:
        """One step, plain or under a plan."""
        torch.manual_seed(1)
        self.net.zero_grad(set_to_none=True)
        with Tape(made, holders=holders) if made is not None else nullcontext():
            loss = self._step(self.net, self.inputs)
        loss.backward()

    def run(self, made: Plan | None = None, holders: Holders | None = None) -> list[Tensor]:
        """The same; returns copies of its gradients, which take memory and time of their own."""
        self.step(made, holders)
        return [p.grad.clone() for p in self.net.parameters() if p.grad is not None]


def measured(case: Case, plans: Sequence[Plan], holders: Holders) -> Iterator[Measured]:
    """The plain step and plans in turns, then their peaks and gradients."""
    runs = [case.step, *(partial(case.step, made, holders) for made in plans)]
    (wall_s, thread_s), *taken = in_turns(runs, case.n_rounds, warm_up=True)
    resident = case.resident_bytes
    plain_bytes = step_peak_bytes(case.net, case.step) + resident  # only now: oneDNN's caches are warm for all
    for made, (its_wall_s, its_thread_s) in zip(plans, taken, strict=True):
        places = {getattr(action, "to", None) for action in made.away.values()}
        staging = sum(link.device_bytes for link in case.trace.links if link.to in places)
        yield Measured(
            plain_bytes=plain_bytes,
            peak_bytes=step_peak_bytes(case.net, partial(case.step, made, holders)) + staging + resident,
            predicted_bytes=made.peak_bytes,
            wall=its_wall_s / wall_s,
            processor=its_thread_s / thread_s,
            predicted=made.seconds / case.trace.seconds,
            moved_bytes=made.timeline.transfers.moved_bytes,
            equal=all(torch.equal(a, b) for a, b in zip(case.run(made, holders), case.want, strict=True)),
        )


def rows_under(case: Case, name: str, share: float, plans: dict[str, Plan], holders: Holders) -> Iterator[Row]:
    """A row for each plan of a net."""
    for who, found in zip(plans, measured(case, list(plans.values()), holders), strict=True):
        yield Row(name, who, share, resident_bytes=case.resident_bytes, **vars(found))


def disk_rows(name: str, folder: Path, n_rounds: int) -> Iterator[Row]:
    """Recomputation alone, and `auto` with a disk, at shares of a net's peak above its weights."""
    make, shares = DISK_NETS[name]
    case = Case(make(), n_rounds)
    plain, options = case.trace, HolderOptions(folder=folder)
    with_disk = plain.with_machine(measure_links(["disk"], options))
    for share in shares:
        budget = plain.resident_bytes + int(share * (simulate(plain).peak_bytes - plain.resident_bytes))
        found = {}
        for who, trace in (("auto", plain), (BOTH, with_disk)):
            try:
                found[who] = plan(trace, budget)
            except InfeasibleBudgetError:
                yield Row(name, who, share, fits=False)
        case.trace = with_disk
        holders = Holders(options)
        yield from rows_under(case, name, share, found, holders)
        holders.close()


def codec_rows(name: str, folder: Path, n_rounds: int) -> Iterator[Row]:
    """Exact codecs alone: nothing is recomputed, nothing moved."""
    case = Case(CODEC_NETS[name](), n_rounds)
    case.trace = case.trace.with_machine(codecs=measure_codecs())
    free = free_codecs(case.trace)
    made = plan(case.trace, policy=lambda step, budget: free)
    yield from rows_under(case, name, 0.0, {"codecs alone": made}, Holders(HolderOptions(folder=folder)))


def figures(
    tables: Sequence[str] = ("codecs", "disk"),
    *,
    nets: Sequence[str] = (*CODEC_NETS, *DISK_NETS),
    rounds: int = ROUNDS,
    disk: Path = TEMPORARY,
) -> Iterator[Row]:
    """The rows that are asked for.

    Args:
        tables: Which.
        nets: Of both tables.
        rounds: How often each plan is timed.
        disk: Where the disk's file is.
    """
    keep_freed_memory()
    for of_table, of_nets, made in (("codecs", CODEC_NETS, codec_rows), ("disk", DISK_NETS, disk_rows)):
        for name in of_nets:
            if of_table in tables and name in nets:
                yield from made(name, disk, rounds)


def _disk(row: Row) -> str:
    return text_of(DISK if row.fits else "{net}, {share:g} | {plan} | none found |  |  |  | ", row)


HEAD = "peak (predicted) | wall | processor | predicted"
TIMES = "{peak:.3f} ({predicted_peak:.3f}) | {wall:x.3f} | {processor:x.3f} | {predicted:x.3f}"
DISK = f"{{net}}, {{share:g}} | {{plan}} | {TIMES} | {{moved_mib:.0f}} MiB"
CODECS = f"{{net}} | {{above:.3f}} | {TIMES}"
TABLES = {
    "disk": table(Row, f"net, budget | plan | {HEAD} | moved", _disk, lambda row: row.share),
    "codecs": table(Row, f"net | peak above weights | {HEAD}", CODECS, lambda row: not row.share),
}
CHOICES = {"tables": ("codecs", "disk"), "nets": (*CODEC_NETS, *DISK_NETS)}
BENCHMARK = Benchmark("offload", figures, {"rows": Row}, TABLES, CHOICES, ("net", "plan", "share"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
