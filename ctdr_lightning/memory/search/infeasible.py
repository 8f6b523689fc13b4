"""The message for a budget that cannot be met: the least peak, its cause, and the nearest remedy."""

from __future__ import annotations

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import format_bytes, format_roomy, format_seconds
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.simulator.timeline import Timeline

_NEARLY = 1.1  # up to 10 % over the budget, raising it is the smaller change than another batch


def infeasible(best: Plan, budget_bytes: int, policy: str, least_bytes: int, asked: str = "") -> InfeasibleBudgetError:
    """The error for a budget that a policy cannot meet.

    Args:
        best: The plan that comes closest to the budget, of all policies.
        budget_bytes: Largest peak allowed.
        policy: The policy that was asked.
        least_bytes: The least peak that it finds.
        asked: The budget as the user wrote it; empty for its bytes.
    """
    timeline = best.timeline
    fits = best.peak_bytes <= budget_bytes
    least = f"its least peak is {format_bytes(least_bytes)}"
    if policy != best.policy and not fits:
        least += f", that of any policy is {format_bytes(best.peak_bytes)}"
    return InfeasibleBudgetError(
        f"No plan of policy {policy!r} fits the budget of {asked or format_bytes(budget_bytes)}: {least}, set by "
        f"{culprit(timeline)}.",
        f"Policy {best.policy!r} fits it, with a step of {format_seconds(best.seconds)}."
        if fits
        else nearest_remedy(timeline, best.peak_bytes, budget_bytes, least_bytes),
        least_peak_bytes=least_bytes,
    )


def nearest_remedy(timeline: Timeline, least_bytes: int, budget_bytes: int, asked_least_bytes: int = 0) -> str:
    """Name the possible changes, the smallest first.

    Args:
        timeline: Of the plan with the least peak.
        least_bytes: That peak, with the bytes that are resident outside of the step.
        budget_bytes: Largest peak allowed.
        asked_least_bytes: The least peak of the policy that was asked, which may be more: the budget that is named has
            to do for that policy.
    """
    at_end = int(timeline.bytes_at[-1]) if len(timeline.bytes_at) else 0
    fixed = at_end + least_bytes - timeline.peak_bytes
    higher = f"raise memory_budget to {format_roomy(max(least_bytes, asked_least_bytes))}"
    smaller = _smaller(fixed, least_bytes, budget_bytes)
    if budget_bytes <= fixed:
        change = f"{smaller}, or {higher}" if smaller else higher
        return f"Weights, gradients and optimizer state alone take {format_bytes(fixed)}: {change}."
    first, second = (higher, smaller) if least_bytes <= _NEARLY * budget_bytes or not smaller else (smaller, higher)
    return f"{first[0].upper()}{first[1:]}{second and f'; or {second}'}."


def _smaller(fixed: int, least_bytes: int, budget_bytes: int) -> str:
    """The necessary reductions of the batch or the weights, the smaller change first; empty if neither helps.

    The fixed part grows with the weights, the rest of the peak with the batch.
    """
    batch = int(100 * (budget_bytes - fixed) / max(least_bytes - fixed, 1))
    weights = int(100 * (1 - (least_bytes - budget_bytes) / max(fixed, 1)))
    changes = [
        (batch, f"a batch about {batch}% as large"),
        (weights, f"a rank that leaves about {weights}% of the weights"),
    ]
    named = [words for share, words in sorted(changes, reverse=True) if share > 0]
    return f"use {' or '.join(named)}" if named else ""


def culprit(timeline: Timeline) -> str:
    """The largest tensor alive at the peak, in words."""
    alive = timeline.alive_at_peak()
    if not alive:
        return f"weights and inputs of {format_bytes(timeline.trace.resident_bytes)}"
    module, op, n_bytes = alive[0]
    return f"{module} ({op}, {format_bytes(n_bytes)})"
