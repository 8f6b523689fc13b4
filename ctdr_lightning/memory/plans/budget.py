"""Limits of a plan: bytes, seconds, and time to search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a plan.

    Attributes:
        peak_bytes: Largest peak of the step, weights and gradients included; None for no limit.
        seconds: Longest step; None for no limit.
        time_limit_s: How long the policy may think.
        seed: Seed of whatever is random in the policy.
    """

    peak_bytes: int | None = None
    seconds: float | None = None
    time_limit_s: float = 5.0
    seed: int = 0
