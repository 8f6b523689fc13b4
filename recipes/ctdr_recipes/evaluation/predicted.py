"""Predictions at the published sizes: every step is recorded on fake tensors for a named GPU, and nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import Trace, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_recipes.evaluation.nets import Net
from ctdr_recipes.evaluation.shares import saved_shares
from ctdr_recipes.evaluation.techniques import (
    BUDGET_SHARE,
    CTDR,
    DECOMPOSED,
    DENSE,
    OFFLOADED,
    PLANNERS,
    RECOMPUTED,
    TECHNIQUES,
    least_bytes,
    on_meta,
    shapes_at,
    with_link,
)

_ADAM_TENSORS = 2
# Offloading is left out: to see that no plan fits takes vDNN++ 80 s a batch (ResNet-50), and a peak of 0.89 to 1.00 of
# the dense one leaves little to find.
_SEARCHED = (DECOMPOSED, RECOMPUTED, CTDR)
# Steps away from the guess double from here on; then the bracket is halved. A plan of DenseNet-121 takes 5 s.
_STEP = 0.03
_TRIES = 10
_CLOSE = 0.01  # of the batch: a bracket so narrow is not halved again


@dataclass(frozen=True)
class Row:
    """One network under one technique, as numbers.

    Attributes:
        net: Name of the network.
        technique: Name of the technique.
        source: ``"predicted"`` or ``"measured"``.
        batch_size: Samples in a step.
        parameters: Of the network.
        peak_bytes: Of a step: weights, gradients, Adam's state, activations.
        seconds: Of a step: forward and backward.
        fits: Whether the peak is within the technique's limit; dense and decomposition have none.
        largest_batch: The largest batch found that fits the dense step's peak; 0 where it was not looked for.
        day: When it was measured, as year-month-day; empty for predictions.
    """

    net: str
    technique: str
    source: str
    batch_size: int
    parameters: int
    peak_bytes: int
    seconds: float
    fits: bool
    largest_batch: int = 0
    day: str = ""


@dataclass(frozen=True)
class Anatomy:
    """Why a network gains as it does.

    Attributes:
        net: Its name.
        variant: Dense or decomposed.
        saved_bytes: What autograd saves.
        shares: Share of the saved bytes by kind of op, the largest first.
        static_share: Share of the peak that is there all along: weights, gradients, optimizer's state.
        floor_share: What no plan can go below, as a share of the peak.
        peak_op: The op at the peak.
    """

    net: str
    variant: str
    saved_bytes: int
    shares: dict[str, float]
    static_share: float
    floor_share: float
    peak_op: str


def predict(name: str, net: Net, device: str, precision: str = "32-true") -> tuple[list[Row], list[Anatomy]]:
    """All techniques on one network.

    Args:
        name: Of the network.
        net: At its published size.
        device: A name from the device table, such as ``"a100"``.
        precision: As Lightning names it, or ``"tf32"``.
    """
    models = _variants(net)
    traces = {variant: _traced(model, net, device, precision, net.size) for variant, model in models.items()}
    whole = simulate(traces[DENSE]).peak_bytes
    rows = []
    for technique in TECHNIQUES:
        variant = _variant(technique)
        limit = int(BUDGET_SHARE * whole)
        found = PLANNERS[technique](_equipped(technique, traces[variant], device), limit)
        rows.append(
            Row(
                name, technique, "predicted", net.size, sum(p.numel() for p in models[variant].parameters()),
                found.plan.peak_bytes, found.plan.seconds, found.fits,
            )
        )  # fmt: skip
    return rows, [anatomy(name, variant, trace) for variant, trace in traces.items()]


def with_batches(rows: Sequence[Row], net: Net, device: str, precision: str = "32-true") -> list[Row]:
    """One network's rows with the largest batch of each technique that is searched for.

    Args:
        rows: What `predict` found.
        net: At its published size.
        device: As for `predict`.
        precision: As for `predict`.
    """
    models = _variants(net)
    (limit,) = (row.peak_bytes for row in rows if row.technique == DENSE)
    found = {DENSE: net.size}
    for technique in _SEARCHED:
        traced = partial(_traced, models[_variant(technique)], net, device, precision)
        found[technique] = _largest(technique, traced, net.size, limit)
    # CTDR chooses its ranks too, so that each single technique's step is one of its own.
    found[CTDR] = max(found.values())
    return [replace(row, largest_batch=found.get(row.technique, 0)) for row in rows]


def _variants(net: Net) -> dict[str, nn.Module]:
    dense = on_meta(net.build)
    return {DENSE: dense, DECOMPOSED: structure_of(dense, shapes_at(dense))}


def _variant(technique: str) -> str:
    return DECOMPOSED if technique in (DECOMPOSED, CTDR) else DENSE


def _traced(model: nn.Module, net: Net, device: str, precision: str, size: int) -> Trace:
    trace = record_fake(model, net.batch(size, "meta"), net.step, device=device, precision=precision)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return trace.with_static(_ADAM_TENSORS * trained)


def _equipped(technique: str, trace: Trace, device: str) -> Trace:
    return with_link(trace, device) if technique == OFFLOADED else trace


def _largest(technique: str, traced: Callable[[int], Trace], size: int, limit: int) -> int:
    """The largest batch of those tried whose plan fits a limit; 0 where none does."""

    def fits(batch: int) -> bool:
        trace = traced(batch)
        return floor_bytes(trace) <= limit and least_bytes(technique, trace, limit) <= limit

    return largest_near(_guess(technique, traced, size, limit), fits)


def largest_near(guess: int, fits: Callable[[int], bool]) -> int:
    """The largest batch found that fits, up or down from a guess; 0 where none does.

    Steps away from the guess double until one batch fits and one does not; then the bracket is halved, down to 1 %.
    A larger one may fit: the tries are few, and a search for plans may miss one that is there.

    Args:
        guess: Where to begin.
        fits: Whether a batch's plan fits; asked ten times at most.
    """
    low, high, size, stride = 0, 0, guess, max(1, int(_STEP * guess))
    for _ in range(_TRIES):
        low, high = (size, high) if fits(size) else (low, size)
        if high and high - low <= max(1, _CLOSE * low):
            break
        if low and high:
            size = (low + high) // 2
        else:
            size = low + stride if low else max(high - stride, 1)
            stride *= 2
    return low


def _guess(technique: str, traced: Callable[[int], Trace], size: int, limit: int) -> int:
    """The batch whose least peak reaches a limit: by a line from the weights through one batch, then through two."""
    trace = traced(size)
    static, first = trace.resident_bytes, least_bytes(technique, trace)
    second_size = max(int(size * (limit - static) / max(first - static, 1)), 1)
    if second_size == size:
        return size
    slope = (least_bytes(technique, traced(second_size)) - first) / (second_size - size)
    return max(int(size + (limit - first) / slope), 1)


def anatomy(name: str, variant: str, trace: Trace) -> Anatomy:
    """Shares, floor and peak of a step, from its trace."""
    plain = simulate(trace)
    shares = saved_shares(trace)
    at_peak = Counter({op.name: 1 for op in trace.ops if op.tick == plain.peak_tick})
    return Anatomy(
        net=name,
        variant=variant,
        saved_bytes=sum(trace.value_bytes(v) for v in trace.saved),
        shares=shares,
        static_share=trace.resident_bytes / plain.peak_bytes,
        floor_share=floor_bytes(trace) / plain.peak_bytes,
        peak_op=next(iter(at_peak), "the start"),
    )
