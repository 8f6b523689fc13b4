"""The default: the best plan at tensor granularity, near its lower bound, by rounding and local search.

No paper. The relaxation behind the lower bound is rounded to a plan, which local search over single values (kept,
recomputed once, recomputed at each use; unsaved values such as residual sums held as cheap checkpoints) repairs and
fills; then it goes on from every other policy's plan, and by random changes, until the gap to the bound is closed to a
quarter of a percent or an allowance of work is spent. Every other policy's plan is also looked at as it is, so that
none is better; except those whose solver stops by the clock. The allowance is counted in work, not in seconds, so that
the same trace gives the same plan everywhere; the clock only stops a search that takes far too long.

Complexity: a linear program of two variables a value, then about linear in the values times the size of their groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.fastest import Fastest, smallest_within
from ctdr_lightning.memory.search.local_search import Search
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

TOO_SLOW = {"auto", "checkmate"}
USUAL_TIME_LIMIT_S = 5.0
# Work for the usual time limit: what a net of some hundred ops needs until its gap stays, and more for larger ones.
WORK_AT_LEAST, WORK_PER_OP = 400_000, 200
# The safety stop: so many ops may take as long again as the usual time limit.
OPS_PER_TIME_LIMIT = 2_000


@POLICIES.register("auto")
def auto(trace: Trace, budget: Budget) -> Actions:
    """The fastest plan whose peak fits, or the one with the least peak that is fast enough.

    With ``budget.seconds`` the peak is made as small as that time allows; with ``budget.peak_bytes`` the time as short
    as that peak allows; with neither everything is kept. Where nothing fits, what comes closest is returned.
    """
    if budget.seconds is None and budget.peak_bytes is None:
        return {}
    if budget.seconds is None and budget.peak_bytes is not None and _plain_peak_bytes(trace) <= budget.peak_bytes:
        return {}
    search = _search(trace, budget)
    others = list(_plans_of_others(trace, budget))
    if budget.seconds is not None:
        best = smallest_within(trace, search, budget.seconds)
    else:
        assert budget.peak_bytes is not None
        best = Fastest(trace, search, budget.peak_bytes).run(others)
    actions: Actions = search.frontier.actions(best)
    least = _rank(best.peak_bytes, best.seconds, budget)
    for other in others:
        simulator = Simulator(trace, other)
        rank = _rank(simulator.peak_bytes, simulator.seconds, budget)
        if rank < least:
            least, actions = rank, other
    return actions


def _search(trace: Trace, budget: Budget) -> Search:
    patience = budget.time_limit_s / USUAL_TIME_LIMIT_S
    allowance = patience * max(WORK_AT_LEAST, WORK_PER_OP * len(trace.ops))
    stop_s = time.thread_time() + budget.time_limit_s * (1 + len(trace.ops) / OPS_PER_TIME_LIMIT)
    return Search(trace, budget.seed, allowance, lambda: time.thread_time() > stop_s)


def _plain_peak_bytes(trace: Trace) -> int:
    return Simulator(trace).peak_bytes


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
