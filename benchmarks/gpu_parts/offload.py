"""Saved tensors and optimizer states in host memory: rates, overlap, bits, and the pinned bytes of many lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu_parts.cases import FULL, MIXED, Case, Cost, cost, device, differences, outcome, placed, words
from benchmarks.nets import vision
from benchmarks.steps import guided
from ctdr_lightning.basics.errors import CTDRError, first_line
from ctdr_lightning.memory import Budget, Plan, Trace, plan, record
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.holders.measure import measure_links
from ctdr_lightning.memory.holders.optimizer_state import StateAway
from ctdr_lightning.memory.plans.plan import most_away_bytes

NETS = {"GPT-2 medium": partial(words, 24, 1024, 8, 1024), "ResNet-50": partial(vision, "resnet50", 128, 224)}
TINY = {"GPT": partial(words, 2, 64, 2, 16)}
SHARES = (0.5, 0.3)


@dataclass(frozen=True)
class Rates:
    """Measured rates of a link.

    Attributes:
        link: Its name.
        out_gib_per_s: From the device.
        back_gib_per_s: To it.
        latency_s: Of the smallest transfer.
    """

    link: str
    out_gib_per_s: float
    back_gib_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Moved:
    """A step part of whose tensors wait in host memory.

    Attributes:
        net: The net's name.
        way: What moves.
        asked: Share of the plain peak above the weights.
        away_bytes: The most bytes that wait elsewhere.
        pinned_bytes: Pinned by the holder.
        predicted_bytes: Peak of the plan.
        allocated_bytes: Measured.
        predicted: Seconds over the plain step's, predicted.
        measured: The same, measured.
        differing: Tensors that are not the plain step's to the bit.
        trouble: An error.
    """

    net: str
    way: str
    asked: float = 0.0
    away_bytes: int = 0
    pinned_bytes: int = 0
    predicted_bytes: int = 0
    allocated_bytes: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    differing: int = 0
    trouble: str = ""


def rows(small: bool = False) -> Iterator[Rates | Moved]:
    """Rates, plans with a host, many lengths, an optimizer's state."""
    name = "host" if device().type == "cuda" else "disk"
    options = HolderOptions(device=device().type)
    (link,) = measure_links([name], options)
    yield Rates(name, link.out_bytes_per_s / 2**30, link.in_bytes_per_s / 2**30, link.latency_s)
    for net, make in (TINY if small else NETS).items():
        with placed(make, FULL if small else MIXED) as case:
            case.plain()
            case.net.zero_grad(set_to_none=True)
            trace = record(case.step).with_machine([link], [])
            yield from _plans(net, case, trace, name, options)
    yield _lengths(name, options, small)
    yield from _optimizer(name, options, small)


def _plans(net: str, case: Case, trace: Trace, name: str, options: HolderOptions) -> Iterator[Moved]:
    plain = cost(case.net, case.plain)
    want = outcome(case, case.plain)
    dense = plan(trace, policy="keep").peak_bytes
    for share in SHARES:
        limit = int(trace.resident_bytes + share * (dense - trace.resident_bytes))
        for way, of in ((f"auto, {name}", trace), ("auto", trace.with_machine([], []))):
            try:
                made = plan(of, Budget(peak_bytes=limit, time_limit_s=1.0))
                yield _run(Moved(net, way, share), case, made, plain, want, options)
            except (CTDRError, RuntimeError, AssertionError) as error:
                yield Moved(net, way, share, trouble=first_line(error))


def _run(
    row: Moved, case: Case, made: Plan, plain: Cost, want: dict[str, torch.Tensor], options: HolderOptions
) -> Moved:
    holders = Holders(options)
    try:
        run = guided(case.step, made, holders=holders)
        differing, _ = differences(outcome(case, run), want)
        found = cost(case.net, run)
        pinned, away = holders.most_pinned_bytes, sum(most_away_bytes([made]).values())
        return Moved(
            row.net, row.way, row.asked, away, pinned, made.peak_bytes, found.allocated_bytes,
            made.seconds / made.trace.seconds, found.seconds / plain.seconds, differing,
        )  # fmt: skip
    finally:
        holders.close()


def _lengths(name: str, options: HolderOptions, small: bool) -> Moved:
    """Parcels of random lengths: what is pinned beside the most that waited at once."""
    draw, holders, most = random.Random(0), Holders(options), 0
    try:
        for _ in range(20 if small else 200):
            sizes = [draw.randrange(64, 512) * (1 << 8 if small else 1 << 12) for _ in range(8)]
            parcels = [holders[name].put([torch.ones(n, device=device())]) for n in sizes]
            most = max(most, 4 * sum(sizes))
            for parcel in parcels:
                parcel.gone()
            for parcel in reversed(parcels):
                parcel.fetch()
        return Moved("200 random lengths", name, away_bytes=most, pinned_bytes=holders.most_pinned_bytes)
    finally:
        holders.close()


def _optimizer(name: str, options: HolderOptions, small: bool) -> Iterator[Moved]:
    """AdamW's state on the device and elsewhere: six steps with the same weights, and the time of one."""
    make = TINY["GPT"] if small else NETS["GPT-2 medium"]
    costs, weights = {}, {}
    for way in ("on the device", name):
        with placed(make, FULL if small else MIXED) as case:
            optimizer = torch.optim.AdamW(case.net.parameters(), 1e-4, foreach=False)
            holders = Holders(options)
            away = None if way != name else StateAway(optimizer, holders[name])

            def step(case: Case = case, optimizer: torch.optim.Optimizer = optimizer) -> None:
                torch.manual_seed(1)
                case.plain()
                optimizer.step()

            costs[way] = cost(case.net, step, rounds=4)
            weights[way] = {n: p.detach().cpu().clone() for n, p in case.net.named_parameters()}
            found, base = costs[way], costs["on the device"]
            differing, _ = differences(weights[way], weights["on the device"])
            moved = away.moved_bytes if away is not None else 0
            yield Moved(
                "AdamW", f"state {way}", away_bytes=moved, pinned_bytes=holders.most_pinned_bytes,
                allocated_bytes=found.allocated_bytes, measured=found.seconds / base.seconds, differing=differing,
            )  # fmt: skip
            if away is not None:
                away.release()
            holders.close()
