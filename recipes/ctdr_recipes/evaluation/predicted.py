"""Predictions at the published sizes: every step is recorded on fake tensors for a named GPU, and nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from ctdr_lightning.evaluate.shares import saved_shares
from ctdr_lightning.joint.twins import structure_of
from ctdr_lightning.memory import Trace, record_fake, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_recipes.evaluation.nets import Net
from ctdr_recipes.evaluation.techniques import (
    BUDGET_SHARE,
    CTDR,
    DECOMPOSED,
    DENSE,
    OFFLOADED,
    PLANNERS,
    TECHNIQUES,
    on_meta,
    shapes_at,
    with_link,
)

_ADAM_TENSORS = 2
# A found batch fits, as its own plan says; the next larger tried did not. 3 % steps: a plan takes seconds.
_STEP = 0.03
_TRIES = 6


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
        largest_batch: The largest batch tried that fits the dense step's peak; 0 where it was not looked for.
        accuracy: After training and fine-tuning, in percent; -1 where it was not measured.
        raw_accuracy: The same before fine-tuning.
        epochs: Epochs of fine-tuning.
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
    accuracy: float = -1.0
    raw_accuracy: float = -1.0
    epochs: int = 0


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


def predict(name: str, net: Net, device: str, *, batches: bool) -> tuple[list[Row], list[Anatomy]]:
    """All techniques on one network.

    Args:
        name: Of the network.
        net: At its published size.
        device: A name from the device table, such as ``"a100"``.
        batches: Whether to look for the largest batch as well, which takes most of the time.
    """
    dense = on_meta(net.build)
    models = {DENSE: dense, DECOMPOSED: structure_of(dense, shapes_at(dense))}
    traced = {variant: partial(_traced, model, net, device) for variant, model in models.items()}
    traces = {variant: trace(net.size) for variant, trace in traced.items()}
    whole = simulate(traces[DENSE]).peak_bytes
    rows = []
    for technique in TECHNIQUES:
        variant = DECOMPOSED if technique in (DECOMPOSED, CTDR) else DENSE
        limit = int(BUDGET_SHARE * whole)
        found = PLANNERS[technique](_equipped(technique, traces[variant], device), limit)
        rows.append(
            Row(
                name, technique, "predicted", net.size, sum(p.numel() for p in models[variant].parameters()),
                found.plan.peak_bytes, found.plan.seconds, found.fits,
                _largest(technique, traced[variant], net.size, whole, device) if batches else 0,
            )
        )  # fmt: skip
    return rows, [anatomy(name, variant, trace) for variant, trace in traces.items()]


def _traced(model: nn.Module, net: Net, device: str, size: int) -> Trace:
    trace = record_fake(model, net.batch(size, "meta"), net.step, device=device)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return trace.with_static(_ADAM_TENSORS * trained)


def _equipped(technique: str, trace: Trace, device: str) -> Trace:
    return with_link(trace, device) if technique == OFFLOADED else trace


def _largest(technique: str, traced: Callable[[int], Trace], size: int, limit: int, device: str) -> int:
    """The largest batch tried whose plan fits a limit."""

    def fits(batch: int) -> bool:
        return PLANNERS[technique](_equipped(technique, traced(batch), device), limit).fits

    guess = _guess(technique, traced, size, limit, device)
    for _ in range(_TRIES):
        if guess <= size:
            return size
        if fits(guess):
            return guess
        guess = int(guess * (1 - _STEP))
    return size


def _guess(technique: str, traced: Callable[[int], Trace], size: int, limit: int, device: str) -> int:
    """Where a limit lies if the least peak grows with the batch by a straight line."""

    def least(batch: int) -> int:
        trace = _equipped(technique, traced(batch), device)
        return PLANNERS[technique](trace, 1).plan.peak_bytes

    low, high = least(size), least(2 * size)
    return int(size + size * (limit - low) / max(high - low, 1))


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
