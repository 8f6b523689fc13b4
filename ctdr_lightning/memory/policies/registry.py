"""Where policies register, and what they are given."""

from __future__ import annotations

from typing import Protocol

from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.traces.trace import Trace


class Policy(Protocol):
    """From a trace and a budget to actions; values that are not named keep their default (saved: keep)."""

    def __call__(self, trace: Trace, budget: Budget) -> Actions:
        """Choose an action for each value.

        Raises:
            InfeasibleBudgetError: When the policy finds nothing that fits.
        """
        ...


POLICIES: Registry[Policy] = Registry("policy", group="ctdr_lightning.policies")
