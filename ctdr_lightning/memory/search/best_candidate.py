"""Among a policy's candidate plans, the one that the budget asks for; the simulator judges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import format_bytes, format_roomy
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.simulator.actions import Actions
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.room import with_room
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline


def choose(
    step: Prepared, candidates: Iterable[Actions | Timeline], budget: Budget, policy: str, note: str = ""
) -> Timeline:
    """Simulate the candidates and take the best, which travels on with its timeline: nobody simulates it again.

    Args:
        step: The recorded step.
        candidates: At least one set of actions, or their timelines; the first of equals wins.
        budget: Of the candidates within its limits the fastest is taken where ``peak_bytes`` is limited, else the one
            with the least peak.
        policy: Name for the error.
        note: A further sentence for the error.

    Raises:
        InfeasibleBudgetError: If no candidate fits.
    """
    best: tuple[float, float] | None = None
    chosen: Timeline | None = None
    least_peak = 0
    for candidate in candidates:
        timeline = candidate if isinstance(candidate, Timeline) else judge(step, candidate)
        peak, seconds = timeline.peak_bytes, timeline.seconds
        least_peak = min(least_peak or peak, peak)
        if peak > _or_infinite(budget.peak_bytes) or seconds > _or_infinite(budget.seconds):
            continue
        score = (peak, seconds) if budget.peak_bytes is None else (seconds, peak)
        if best is None or score < best:
            best, chosen = score, timeline
    if chosen is None:
        raise _infeasible(least_peak, budget, policy, note)
    return chosen


def waiting_for_room(step: Prepared, candidates: Iterable[Actions], budget: Budget) -> Iterator[Timeline]:
    """Candidates of a system whose allocations wait for what is on its way out.

    Args:
        step: The recorded step.
        candidates: Sets of actions.
        budget: Its peak is the room; without one nothing waits.
    """
    limit = budget.peak_bytes
    for actions in candidates:
        timeline = judge(step, actions)
        yield (
            timeline if limit is None or timeline.peak_bytes <= limit else judge(step, with_room(step, actions, limit))
        )


def _or_infinite(limit: float | None) -> float:
    return float("inf") if limit is None else limit


def _infeasible(least_peak_bytes: int, budget: Budget, policy: str, note: str) -> InfeasibleBudgetError:
    if budget.peak_bytes is None:
        return InfeasibleBudgetError(
            f"No plan of policy {policy!r} takes at most {budget.seconds} s.",
            "Allow more seconds.",
            least_peak_bytes=least_peak_bytes,
        )
    return InfeasibleBudgetError(
        f"No plan of policy {policy!r} fits the budget of {format_bytes(budget.peak_bytes)}; its least peak is "
        f"{format_bytes(least_peak_bytes)}." + f" {note}" * bool(note),
        f"Raise memory_budget to {format_roomy(least_peak_bytes)}, choose policy 'auto', or use a smaller batch, a "
        "lower rank, or offload.",
        least_peak_bytes=least_peak_bytes,
    )
