"""Where policies register, and what they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.memory.plans.plan import Actions
from ctdr_lightning.memory.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may take.

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


class Policy(Protocol):
    """From a trace and a budget to actions; values that are not named keep their default (saved: keep)."""

    def __call__(self, trace: Trace, budget: Budget) -> Actions:
        """Choose an action for each value.

        Raises:
            InfeasibleBudgetError: When the policy finds nothing that fits.
        """
        ...


POLICIES: Registry[Policy] = Registry("policy", group="ctdr_lightning.policies")
