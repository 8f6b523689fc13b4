"""Keep everything: plain autograd, the baseline of every other policy. Complexity O(1)."""

from __future__ import annotations

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.simulator.actions import Actions, Keep
from ctdr_lightning.memory.simulator.prepared import Prepared


@POLICIES.register("keep", uses=frozenset({Keep}))
def keep(step: Prepared, budget: Budget) -> Actions:
    """Drop nothing."""
    return {}
