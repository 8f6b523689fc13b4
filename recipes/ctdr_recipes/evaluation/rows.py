"""The figures of the evaluation, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ctdr_recipes.evaluation.techniques import BUDGET_SHARE


@dataclass(frozen=True)
class Row:
    """One network under one technique, as numbers.

    Attributes:
        net: Name of the network.
        technique: Name of the technique.
        source: ``"predicted"`` or ``"measured"``.
        batch_size: Samples in a step.
        parameters: Of the network.
        peak_bytes: Of a step: weights, gradients, Adam's state, activations. Where no plan fits, the least found.
        seconds: Of a step: forward and backward.
        fits: Whether the peak is within the limit.
        limit: Share of the dense step's peak that is allowed.
        means: What the step does, in words.
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
    limit: float = BUDGET_SHARE
    means: str = ""
    day: str = ""


@dataclass(frozen=True)
class Largest:
    """The largest batch of a technique within the dense step's peak.

    Attributes:
        net: Name of the network.
        technique: Name of the technique.
        batch_size: Samples; 0 where not even one fits.
        seconds: Of its step.
    """

    net: str
    technique: str
    batch_size: int
    seconds: float


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
