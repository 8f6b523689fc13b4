"""Keep everything: plain autograd, the baseline of every other policy. Complexity O(1)."""

from __future__ import annotations

from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.traces.trace import Trace


@POLICIES.register("keep")
def keep(trace: Trace, budget: Budget) -> Actions:
    """Drop nothing."""
    return {}
