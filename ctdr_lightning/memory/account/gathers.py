"""The choice of the FSDP units whose weights stay gathered from the forward to the backward.

A unit whose weights stay spares the step one gather and takes bytes that activations could have; for what these miss,
they are recomputed. So each set of units is planned as the run would plan it, and the least sum of seconds is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.traces.gathers import Gather, staying, without_seconds

# A plan of a large net takes seconds: five sets over the range of possible ones, then two beside the best of these.
_FIRST_SETS = 5


@dataclass(frozen=True)
class StayingUnits:
    """A set of units whose weights stay.

    Attributes:
        units: Their paths.
        saved_s: Seconds of the gathers that are spared.
        recompute_s: Seconds of recomputation under the plan beside them.
    """

    units: tuple[str, ...]
    saved_s: float = 0.0
    recompute_s: float = 0.0


def exposed_s(gather: Gather, seconds: float, device: str) -> float:
    """Seconds of a second gather for which the step waits.

    On a GPU FSDP2 starts the gather while the unit after it computes its gradients, on a stream of its own, and no
    other work is assumed to slow either down. On a processor the step waits for the whole gather.

    Args:
        gather: The gather.
        seconds: Of the whole gather.
        device: Type of the step's device.
    """
    return max(seconds - gather.hidden_s, 0.0) if device == "cuda" else seconds


def choose_staying(
    account: BatchAccount,
    gathers: Sequence[Gather],
    seconds: Mapping[str, float],
    budget_bytes: int,
    policy: str = "auto",
) -> StayingUnits:
    """Choose the units whose weights stay, for the fastest step within a budget.

    The units are put in the order of the seconds that they spare for each byte and tick that they take. Of the sets
    that begin this order, at most seven are planned: those between the largest one without recomputation and the
    largest one that may fit at all.

    Args:
        account: The batch, recorded while all these units were freed after their forward.
        gathers: The second gathers of its step.
        seconds: Of a gather, by the unit's path; units that are left out are freed.
        budget_bytes: The budget.
        policy: The memory policy's name.

    Returns:
        The set; an empty one where nothing fits.
    """
    device = account.step.device
    spared = {g.unit: exposed_s(g, seconds[g.unit], device) for g in gathers if g.unit in seconds}
    known = sorted((g for g in gathers if g.unit in spared), key=lambda g: _order(g, spared[g.unit]))
    step = without_seconds(account.step, known)

    @cache
    def first(n: int) -> BatchAccount:
        return replace(account, step=staying(step, known[:n]))

    @cache
    def recompute_s(n: int) -> float:
        return _recompute_s(first(n), budget_bytes, policy)

    def step_s(n: int) -> float:
        return recompute_s(n) + sum(spared[g.unit] for g in known[n:])

    least = _last(len(known), lambda n: _plain_peak_bytes(first(n)) <= budget_bytes)
    most = _last(len(known), lambda n: first(n).floor_bytes <= budget_bytes)
    best = _least(step_s, max(least, 0), max(most, least, 0))
    if recompute_s(best) == inf:
        return StayingUnits(())
    units = tuple(g.unit for g in known[:best])
    return StayingUnits(units, sum(spared[unit] for unit in units), recompute_s(best))


def _order(gather: Gather, spared_s: float) -> tuple[float, int]:
    return -spared_s / max(gather.n_bytes * gather.ticks, 1), gather.ticks


def _plain_peak_bytes(account: BatchAccount) -> int:
    return max(simulate(account.standing).peak_bytes, account.rest_bytes)


def _recompute_s(account: BatchAccount, budget_bytes: int, policy: str) -> float:
    """Seconds that a step takes longer under its plan; infinity where it has none."""
    if account.floor_bytes > budget_bytes:
        return inf
    try:
        made = plan(account.standing, budget_bytes, policy)
    except InfeasibleBudgetError:
        return inf
    return max(made.wall_seconds - account.standing.seconds, 0.0)


def _last(n: int, holds: Callable[[int], bool]) -> int:
    """The last number up to ``n`` for which something holds that holds up to some number; -1 for none."""
    return bisect_right(range(n + 1), 0, key=lambda i: int(not holds(i))) - 1


def _least(seconds: Callable[[int], float], first: int, last: int) -> int:
    """The number with the least seconds among a few from ``first`` to ``last``; of equal ones the smallest."""
    tried = sorted({first + (last - first) * i // (_FIRST_SETS - 1) for i in range(_FIRST_SETS)})
    best = min(tried, key=lambda n: (seconds(n), n))
    place = tried.index(best)
    beside = {(best + other) // 2 for other in tried[max(place - 1, 0) : place + 2]}
    return min(beside | {best}, key=lambda n: (seconds(n), n))
