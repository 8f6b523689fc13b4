"""The default: the best plan found at tensor granularity, by any policy or by local search from there.

No paper. A search over single values (kept, recomputed once, recomputed at each use; unsaved values such as residual
sums held as cheap checkpoints) builds the frontier of bytes against seconds, once for a trace; every budget is answered
from it. The plan of every other policy for the budget is looked at as well, so that none is better; but not that of
``checkmate``, whose solver stops by the clock, and which it comes within a percent of. How long it thinks
is counted in work, not in seconds, so that the same trace gives the same plan everywhere; the clock only stops what
takes far too long. Complexity: about linear in the values, times the size of the groups that they form.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.basics.remembered import Remembered
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.frontier import Frontier, Point
from ctdr_lightning.memory.search.local_search import Search
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

TOO_SLOW = {"auto", "checkmate"}
STARTER, START_SHARES = "capuchin", (0.75, 0.55, 0.4)
USUAL_TIME_LIMIT_S = 5.0
_FRONTIERS: Remembered[Frontier] = Remembered()


@POLICIES.register("auto")
def auto(trace: Trace, budget: Budget) -> Actions:
    """The fastest plan whose peak fits, or the one with the least peak that is fast enough.

    With ``budget.seconds`` the peak is made as small as that time allows; with ``budget.peak_bytes`` the time as short
    as that peak allows; with neither everything is kept. Where nothing fits, what comes closest is returned.
    """
    if budget.seconds is None and budget.peak_bytes is None:
        return {}
    frontier = frontier_of(trace, budget)
    best = min(frontier, key=lambda p: _rank(p.peak_bytes, p.seconds, budget))
    actions: Actions = frontier.actions(best)
    least = _rank(best.peak_bytes, best.seconds, budget)
    for other in _plans_of_others(trace, budget):
        simulator = Simulator(trace, other)
        rank = _rank(simulator.peak_bytes, simulator.seconds, budget)
        if rank < least:
            least, actions = rank, other
    return actions


def frontier_of(trace: Trace, budget: Budget) -> Frontier:
    """The frontier of a trace: searched once, then remembered as long as the trace lives.

    Where its least plan is not small enough a copy is deepened, so that no answer depends on what was asked before.
    """
    patience = budget.time_limit_s / USUAL_TIME_LIMIT_S
    stop_s = time.thread_time() + budget.time_limit_s

    def search(known: Frontier | None = None) -> Search:
        return Search(trace, budget.seed, patience, lambda: time.thread_time() > stop_s, known)

    def first() -> Frontier:
        return search().run(_starts(trace, budget))

    def enough(point: Point) -> bool:
        if budget.seconds is not None:
            return point.seconds > budget.seconds
        return budget.peak_bytes is None or point.peak_bytes <= budget.peak_bytes

    frontier = _FRONTIERS.get(trace, (budget.seed, patience), first)
    if enough(frontier.least):
        return frontier
    limits = (budget.seed, patience, budget.peak_bytes, budget.seconds)
    return _FRONTIERS.get(trace, limits, lambda: search(frontier.copy()).deepen(enough))


def _starts(trace: Trace, budget: Budget) -> Iterator[Actions]:
    """Plans of a fast policy at a few peaks, the same for every budget."""
    plain = Simulator(trace).peak_bytes - trace.resident_bytes
    for share in START_SHARES:
        limits = replace(budget, peak_bytes=trace.resident_bytes + int(plain * share), seconds=None)
        yield from _asked(STARTER, trace, limits)


def _plans_of_others(trace: Trace, budget: Budget) -> Iterator[Actions]:
    for name in POLICIES:
        if name not in TOO_SLOW:
            yield from _asked(name, trace, budget)


def _asked(name: str, trace: Trace, budget: Budget) -> Iterator[Actions]:
    try:
        yield POLICIES[name](trace, budget)
    except CTDRError:
        return  # it finds nothing that fits, or no chain


def _rank(peak_bytes: int, seconds: float, budget: Budget) -> tuple[bool, float, float]:
    """How good a plan is; less is better, and what breaks the budget comes last."""
    if budget.seconds is not None:
        wanted, limit, other = seconds, budget.seconds, float(peak_bytes)
    else:
        assert budget.peak_bytes is not None
        wanted, limit, other = float(peak_bytes), float(budget.peak_bytes), seconds
    return (True, wanted, other) if wanted > limit else (False, other, wanted)
