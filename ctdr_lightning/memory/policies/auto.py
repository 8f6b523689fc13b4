"""The default: the best plan at tensor granularity, near its lower bound, by rounding and local search.

No paper. The relaxation behind the lower bound is rounded to a plan, which local search over single values (kept,
recomputed once, recomputed at each use; unsaved values such as residual sums held as cheap checkpoints) repairs and
fills; then it goes on from every other policy's plan, and by random changes, until the gap to the bound is closed to a
quarter of a percent or an allowance of work is spent. Every other policy's plan is also looked at as it is, so that
none is ahead, but where the gap is under a tenth of a percent; those whose solver stops by the clock are not asked. The
allowance is counted in work, not in seconds, so that the same trace gives the same plan everywhere; the clock only
stops a search that takes far too long.

Complexity: a linear program of two variables a value, then about linear in the values times the size of their groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.fastest import NO_GAP, Fastest, smallest_within
from ctdr_lightning.memory.search.local_search import Search
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

NOT_ASKED = {"auto", "checkmate"}  # itself, and the one whose solver stops by the clock
# Policies that answer budgets which cannot be met. Where the floor proves that, the others search long and find
# nothing: dtr took 8 s for GPT-2.
HEEDLESS = {"keep", "sqrt"}
USUAL_TIME_LIMIT_S = 5.0
# Work for the usual time limit: what a net of some hundred ops needs until its gap stays, and more for larger ones.
WORK_AT_LEAST, WORK_PER_OP = 600_000, 350
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
    search, others = _search(trace, budget), _Others(trace, budget)
    if budget.seconds is not None:
        best = smallest_within(trace, search, budget.seconds)
        others.ask_all()
    else:
        assert budget.peak_bytes is not None
        attempt = Fastest(trace, search, budget.peak_bytes)
        best = attempt.run(others)
        if not attempt.within(NO_GAP) or trace.links or trace.codecs:  # the bound knows nothing of those
            others.ask_all()
    actions: Actions = search.frontier.actions(best)
    least = _rank(best.peak_bytes, best.seconds, budget)
    for other in others.known:
        simulator = Simulator(trace, other)
        rank = _rank(simulator.peak_bytes, simulator.seconds, budget)
        if rank < least:
            least, actions = rank, other
    return actions


class _Others:
    """The other policies' plans, each made when its turn has come: the search ends before where its gap is closed.

    Attributes:
        known: The plans that were made.
    """

    def __init__(self, trace: Trace, budget: Budget) -> None:
        self._trace = trace
        self._budget = budget
        self._names = [name for name in POLICIES if name not in NOT_ASKED]
        self.known: list[Actions] = []
        moves = bool(trace.links or trace.codecs)  # the floor holds for recomputation alone
        if budget.peak_bytes is not None and not moves and floor_bytes(trace) > budget.peak_bytes:
            self._names = [name for name in self._names if name in HEEDLESS]

    def __iter__(self) -> Iterator[Actions]:
        while self._names:
            try:
                self.known.append(POLICIES[self._names.pop(0)](self._trace, self._budget))
            except CTDRError:
                continue  # it finds nothing that fits, or no chain
            yield self.known[-1]

    def ask_all(self) -> None:
        """Make the plans of all that were not asked yet."""
        for _ in self:
            pass


def _search(trace: Trace, budget: Budget) -> Search:
    patience = budget.time_limit_s / USUAL_TIME_LIMIT_S
    allowance = patience * max(WORK_AT_LEAST, WORK_PER_OP * len(trace.ops))
    stop_s = time.thread_time() + budget.time_limit_s * (1 + len(trace.ops) / OPS_PER_TIME_LIMIT)
    return Search(trace, budget.seed, allowance, lambda: time.thread_time() > stop_s)


def _plain_peak_bytes(trace: Trace) -> int:
    return Simulator(trace).peak_bytes


def _rank(peak_bytes: int, seconds: float, budget: Budget) -> tuple[bool, float, float]:
    """How good a plan is; less is better, and what breaks the budget comes last."""
    if budget.seconds is not None:
        wanted, limit, other = seconds, budget.seconds, float(peak_bytes)
    else:
        assert budget.peak_bytes is not None
        wanted, limit, other = float(peak_bytes), float(budget.peak_bytes), seconds
    return (True, wanted, other) if wanted > limit else (False, other, wanted)
