"""Every policy that moves or compresses tensors, on a link of a chosen rate: measured peak, time and bytes moved.

``policies``: all of them on a transformer and a ResNet. ``ratios``: `auto` at four rates. ``least``: predicted for an
A100 and its host's memory, the least peak of each policy that moves alone, and its time where vDNN reaches its own.
``rates``: predicted for an A100 with links of three rates, `auto` beside the fastest of all other policies.

A processor's steps are so slow that any disk looks infinitely fast. So a file, in memory where the system has a place
for such files, is slowed down to a *ratio*: 1 moves all that autograd saves, one way, in the time of one step. Each
policy is given the smallest of ``SHARES`` of the plain peak that it can meet. Peaks are the allocator's, with the
staging buffers; times are of one thread, plain step and plan in turns; gradients are compared with the plain step's to
the bit.
"""

from __future__ import annotations

import ast
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Benchmark, Figures, table, text_of
from benchmarks.nets import HELD_OUT, TUNED, Net, net_rn18, transformer
from benchmarks.offload import ROUNDS, TEMPORARY, Case, Measured, measured
from benchmarks.steps import keep_freed_memory
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.basics.errors import CTDRError, InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Plan, plan, record_fake, simulate
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.holders.measure import measure_codecs, measure_links
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.simulator.actions import Compress, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.traces.machine import Link
from ctdr_recipes.evaluation.nets import FULL
from ctdr_recipes.evaluation.nets import Net as FullNet
from ctdr_recipes.evaluation.predicted import Variant
from ctdr_recipes.evaluation.techniques import Outcome, fastest, movers, on_meta

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
# A folder whose files are in memory, where there is one.
IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else TEMPORARY
RATIOS = (0.25, 0.5, 1.0, 2.0)
POLICY_FILES = Path(__file__).parents[1] / "ctdr_lightning" / "memory" / "policies"


NETS: dict[str, Callable[[], Net]] = {"M": partial(transformer, 4, 384), "RN18": partial(net_rn18, 8)}


@dataclass(frozen=True)
class Row(Measured):
    """One plan at a link's ratio, for a share of the plain peak; 0 where the policy met no share that was tried."""

    net: str
    policy: str
    ratio: float
    share: float

    @property
    def fits(self) -> bool:
        """Whether a plan was found."""
        return bool(self.share)


@dataclass(frozen=True)
class Least:
    """The least peak of a policy that moves alone, predicted.

    Attributes:
        net: Its name.
        policy: The policy.
        ratio: As for `Row`.
        least: Its least peak, as a share of the plain step's bytes above the weights.
        slowdown: Its time within vDNN's least peak over the plain step's; None where it does not fit there.
    """

    net: str
    policy: str
    ratio: float
    least: float
    slowdown: float | None


@dataclass(frozen=True)
class Rate:
    """`auto` beside the fastest of all other policies that fit half the bytes above the weights, predicted.

    Attributes:
        net: Its name.
        ratio: As for `Row`.
        slowdown: Time of `auto`'s plan over the plain step's; None where it has none.
        best: The fastest other policy; empty where none fits.
        other: Its time, likewise.
        planning: Seconds in which `auto` plans, over those that it takes without a link.
    """

    net: str
    ratio: float
    slowdown: float | None
    best: str
    other: float | None
    planning: float


def moving_policies() -> list[str]:
    """Every registered policy that can move or compress."""
    return [name for name, policy in POLICIES.items() if policy.uses & {Offload, Compress}]


class Bench:
    """One net on a slowed-down disk.

    Args:
        name: In ``NETS``.
        folder: Where the disk's file is.
        n_rounds: How often each plan is timed.
    """

    def __init__(self, name: str, folder: Path, n_rounds: int) -> None:
        self.name = name
        self.case = Case(NETS[name](), n_rounds)
        self._plain = self.case.trace
        self._options = HolderOptions(folder=folder)
        (self._disk,) = measure_links(["disk"], self._options)
        self._codecs = measure_codecs()

    def slowed(self, ratio: float) -> Holders:
        """The disk at a rate, in the trace and in fact."""
        saved = sum(self._plain.value_bytes(value) for value in self._plain.saved)
        rate = ratio * saved / self._plain.seconds
        link = replace(self._disk, out_bytes_per_s=rate, in_bytes_per_s=rate)
        self.case.trace = self._plain.with_machine([link], self._codecs)
        holders = Holders(self._options)
        disk: Any = holders["disk"]
        disk.rate_bytes_per_s = rate
        return holders

    def made(self, policy: str) -> tuple[float, Plan | None]:
        """The policy's plan for the smallest budget that it meets, and that budget's share."""
        plain = simulate(self.case.trace).peak_bytes
        for share in SHARES:
            try:
                return share, plan(self.case.trace, int(share * plain), policy)
            except CTDRError:
                continue
        return 0.0, None

    def measured(self, policy: str, ratio: float) -> Row:
        """One policy at one rate."""
        holders = self.slowed(ratio)
        share, made = self.made(policy)
        if made is None:
            return Row(self.name, policy, ratio, 0.0)
        row = Row(self.name, policy, ratio, share, **vars(next(measured(self.case, [made], holders))))
        holders.close()
        return row


SEVERAL = ("R", "T", "RN18", "LSTM small", "ResNet-50", "VGG-16", "GoogLeNet", "GPT-2 12")
EVERY_NET = {name: (TUNED | HELD_OUT)[name] for name in SEVERAL}
RATES_BUDGET = 0.5
CHAIN, VDNN, ROOM = "chain of 16", "vdnn_all", 1.02


def least_peaks(name: str) -> Iterator[Least]:
    """Every policy that moves alone, on a network at its published size."""
    net = PUBLISHED[name]
    plain = Variant(on_meta(net.build), net, "a100", "tf32").plain(net.size)[2]
    trace, whole = plain.trace, plain.plain_peak_bytes - plain.trace.resident_bytes
    saved_s = sum(trace.value_bytes(value) for value in trace.saved) / trace.links[0].out_bytes_per_s
    enough_bytes = int(ROOM * least_of(plain, VDNN))
    for policy in movers():
        made = fastest(plain, enough_bytes, (policy,))
        least = (least_of(plain, policy) - trace.resident_bytes) / whole
        slowdown = made.plan.seconds / trace.seconds if made.fits else None
        yield Least(name, policy, trace.seconds / saved_s, least, slowdown)


def least_of(step: Prepared, policy: str) -> int:
    """The least peak that a policy names, asked for one that no plan reaches."""
    try:
        return POLICIES[policy](step, Budget(step.trace.resident_bytes + 1)).peak_bytes
    except InfeasibleBudgetError as error:
        return error.least_peak_bytes


def rates(name: str) -> Iterator[Rate]:
    """One net at three rates of its link."""
    trace = record_fake(*EVERY_NET[name](), device="a100")
    saved = sum(trace.value_bytes(value) for value in trace.saved)
    limit = trace.resident_bytes + int(RATES_BUDGET * (simulate(trace).peak_bytes - trace.resident_bytes))
    _, alone_s = _timed(Prepared(trace), limit)
    for ratio in (0.3, 1.0, 3.0):
        rate = ratio * saved / trace.seconds
        step = Prepared(trace.with_machine([Link("host", rate, rate, latency_s=1e-6)]))
        made, plan_s = _timed(step, limit)
        others = {policy: fastest(step, limit, (policy,)) for policy in _rivals(step)}
        fitting = {policy: found.plan.seconds for policy, found in others.items() if found.fits}
        best = min(fitting, key=lambda policy: fitting[policy], default="")
        other = fitting[best] / trace.seconds if best else None
        own = made.plan.seconds / trace.seconds if made.fits else None
        yield Rate(name, ratio, own, best, other, plan_s / alone_s)


def _timed(step: Prepared, limit_bytes: int) -> tuple[Outcome, float]:
    start_s = time.process_time()
    return fastest(step, limit_bytes, ("auto",)), time.process_time() - start_s


def _rivals(step: Prepared) -> list[str]:
    """The policies that can do something here; those that the clock stops depend on the machine."""
    return [name for name, of in POLICIES.items() if name != "auto" and not of.clocked and of.works_on(step.trace)]


def _chain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(16)))


def _features(size: int, device: str) -> Tensor:
    return torch.randn(size, 1024, device=device)


PUBLISHED = {
    CHAIN: FullNet(_chain, _features, lambda net, batch: net(batch).square().mean(), 65536, "1024"),
    **{name: FULL[name] for name in ("VGG-16", "ResNet-50", "GoogLeNet", "DenseNet-121", "ViT-B/16", "GPT-2")},
}


def claims() -> dict[str, str]:
    """The claims of each policy's paper, from the heads of the files."""
    found = {}
    for path in POLICY_FILES.glob("*.py"):
        source = path.read_text()
        match = re.search(r"^Claimed: (.*(?:\n {4}.*)*)", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE)
        for name in re.findall(r'POLICIES\.register\(\s*"(\w+)"', source) if match else ():
            found[name] = " ".join(match[1].split()).rstrip(".")
    return found


def figures(
    tables: Sequence[str] = ("policies", "ratios", "least", "rates"),
    *,
    nets: Sequence[str] = tuple(NETS),
    published: Sequence[str] = tuple(PUBLISHED),
    linked: Sequence[str] = tuple(EVERY_NET),
    rounds: int = ROUNDS,
    disk: Path = IN_MEMORY,
) -> Iterator[Row | Least | Rate]:
    """Every policy at ratio 1, `auto` at all ratios, least peaks, and rates.

    Args:
        tables: Which.
        nets: Of the measured ones.
        published: Of the least peaks.
        linked: Of the rates.
        rounds: How often each plan is timed.
        disk: Where the disk's file is.
    """
    keep_freed_memory()
    for name in nets if {"policies", "ratios"} & {*tables} else ():
        bench = Bench(name, disk, rounds)
        if "policies" in tables:
            yield from (bench.measured(policy, 1.0) for policy in moving_policies())
        if "ratios" in tables:
            yield from (bench.measured("auto", ratio) for ratio in RATIOS)
    import_torchvision()
    for name in published if "least" in tables else ():
        yield from least_peaks(name)
    for name in linked if "rates" in tables else ():
        yield from rates(name)


def _policies(found: Figures) -> str:
    said = claims()

    def line(row: Row) -> str:
        return f"{text_of(POLICY if row.fits else UNMET, row)} | {said.get(row.policy, '')}"

    head = "net, policy | peak (predicted) | wall (predicted) | processor | moved | its paper claims"
    return table(Row, head, line, lambda row: row.ratio == 1.0)(found)


def _least(found: Figures) -> str:
    rows = found.rows(Least)
    by_place = {(row.policy, row.net): row for row in rows}
    nets, policies = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("net", "policy"))
    lines = [" | ".join([f"`{policy}`", *(_cell(by_place[policy, net]) for net in nets)]) for policy in policies]
    return found.markdown(" | ".join(["policy", *nets]), lines)


def _rate(row: Rate) -> str:
    own, other = (f"x{found:.3f}" if found else "-" for found in (row.slowdown, row.other))
    return f"{row.net} | {row.ratio:g} | {own} | {other} | {row.best} | x{row.planning:.1f}"


def _cell(row: Least) -> str:
    return f"{row.least:.3f}, {f'x{row.slowdown:.2f}' if row.slowdown else '-'}"


PEAK, MOVED = "{peak:.2f} ({predicted_peak:.2f})", "{moved_mib:.0f} MiB"
POLICY = f"{{net}}, `{{policy}}` | {PEAK} | {{wall:x.2f}} ({{predicted:.2f}}) | {{processor:x.2f}} | {MOVED}"
UNMET = f"{{net}}, `{{policy}}` | over {SHARES[-1]:g} |  |  | "
RATIO = f"{{net}} | {{ratio:g}} | {PEAK} | {{wall:x.3f}} | {{predicted:x.3f}} | {{processor:x.3f}} | {MOVED}"
RATIO_HEAD = "net | rate | peak (predicted) | wall | predicted | processor | moved"
RATIO_TABLE = table(Row, RATIO_HEAD, RATIO, lambda row: row.policy == "auto" and row.fits)
RATES = table(Rate, "net | rate | auto | fastest other | policy | planning", _rate)
TABLES = {"policies": _policies, "ratios": RATIO_TABLE, "least": _least, "rates": RATES}
CHOICES = {"tables": tuple(TABLES), "nets": NETS, "published": PUBLISHED, "linked": EVERY_NET}
KEY = ("net", "policy", "ratio")
BENCHMARK = Benchmark("moving", figures, {"rows": Row, "least": Least, "rates": Rate}, TABLES, CHOICES, KEY)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
