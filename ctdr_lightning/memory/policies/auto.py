"""The default: the best plan at tensor granularity, near its lower bound, by rounding and local search.

No paper. The program behind the lower bound is solved in whole numbers, in rounds that limit bytes where the last plan
broke the budget: each raises the bound and brings a plan. Then the relaxation is rounded to plans, whose long replays
are parted where they do not fit, and which local search over single values (kept, recomputed once, recomputed at each
use; unsaved values such as residual sums held as cheap checkpoints) repairs and fills; then it goes on from every other
policy's plan, and by random changes, until the gap to the bound is closed to a quarter of a percent or an allowance of
work is spent. Every other policy's plan is also looked at as it is, so that none is ahead, but where the gap is under a
tenth of a percent; those whose solver stops by the clock are not asked. The allowance is counted in work, not in
seconds, so that the same trace gives the same plan everywhere; the clock only stops a search that takes far too long,
and does not count the rounds, whose programs are limited in size. Where values have exact codecs, a short search goes
on from the plain step with these as further moves.

Complexity: a linear program of two variables a value, then about linear in the values times the size of their groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.bounds.rounds import MOST_ROUNDS
from ctdr_lightning.memory.plans.actions import Action, Actions, Compress, Keep, Offload, Recompute
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES, Policy
from ctdr_lightning.memory.search.fastest import NO_GAP, Fastest, smallest_within
from ctdr_lightning.memory.search.local_search import LocalSearch
from ctdr_lightning.memory.search.together import codecs_may_pay, free_codecs
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.trace import Trace

# ``Budget.time_limit_s`` where the user says nothing; another time gets so much more or less of the allowance.
USUAL_TIME_LIMIT_S = 5.0
# Work for the usual time limit: what a net of some hundred ops needs until its gap stays, and more for larger ones. A
# million units take 3 to 4 s; six times as much found nothing better for R at 0.3 and RN18 at 0.4.
# No net gets more than the last: the large LSTM at half its peak found nothing more in 5.3 million than it did in 3.
# GPT-2 of 48 layers got 3.9 before; its plan at 0.3 of its peak is 0.7 % slower now, by this or by `ASCENT_SHARE`.
WORK_AT_LEAST, WORK_PER_OP, MOST_WORK = 600_000, 350, 3_000_000
# The safety stop: so many ops may take as long again as the usual time limit, on a machine a third as fast as that of
# these figures. Without the third, a machine half as fast made another plan of twenty values.
OPS_PER_TIME_LIMIT, SLOWEST = 2_000, 3
# Where values have exact codecs, the plain step is polished with them besides, for so much of the allowance at most (of
# ViT, BERT, GPT-2 and GoogLeNet each took up to 4 %, 0.3 s); random changes follow for no more work than the search
# before took, as many plans are proven at once. The best plan without them led to none with them that was faster.
CODECS_SHARE = 0.1
# A step that takes less than this share longer has nothing to win by them.
WORTH_CODECS = 0.005


@POLICIES.register("auto", uses=frozenset({Keep, Recompute, Offload, Compress}), exact=False, asks_others=True)
def auto(step: Prepared, budget: Budget) -> Timeline:
    """The fastest plan whose peak fits, or the one with the least peak that is fast enough.

    With ``budget.seconds`` the peak is made as small as that time allows; with ``budget.peak_bytes`` the time as short
    as that peak allows; with neither everything is kept. Where nothing fits, what comes closest is returned.
    """
    limit = budget.peak_bytes
    if budget.seconds is None and (limit is None or step.plain_peak_bytes <= limit):
        return judge(step, {})
    search, others = _search(step, budget), _Others(step, budget)
    if budget.seconds is not None:
        best = smallest_within(step, search, budget.seconds)
        others.ask_all()
    else:
        assert limit is not None
        attempt = Fastest(step, search, limit, max(1, round(MOST_ROUNDS * _patience(budget))))
        best = attempt.run(others)
        if not attempt.within(NO_GAP) or _moves(step.trace):  # the bound knows nothing of those
            others.ask_all()
    known = [judge(step, search.frontier.actions(best)), *others.known]
    return min([*known, *_smaller(step, budget, known, search.work)], key=lambda made: _rank(made, budget))


def _smaller(step: Prepared, budget: Budget, known: list[Timeline], work: int) -> list[Timeline]:
    """A plan that also writes values in fewer bytes, each by itself; none where codecs have nothing to win.

    Args:
        step: The step.
        budget: What is asked for.
        known: Plans without codecs, or with other policies'.
        work: What the search for them took.
    """
    limit, codecs = budget.peak_bytes, free_codecs(step.trace)
    best = min(known, key=lambda made: _rank(made, budget))
    enough = step.trace.seconds * (1 + WORTH_CODECS)
    if limit is None or budget.seconds is not None or not codecs or _rank(best, budget) <= (False, enough, limit):
        return []
    fits = best.peak_bytes <= limit
    if not fits and not step.trace.asked_codecs:
        return []
    if fits and not step.trace.links and not codecs_may_pay(step, best.actions, codecs):
        return []
    search = _search(step, budget, CODECS_SHARE, codecs)
    if not search.polish({}, limit) and (not fits or search.work < work):
        search.polish(best.actions, limit)
    if not fits and search.frontier.at(limit) is None:
        search.deepen(lambda point: point.peak_bytes <= limit)
    search.improve(limit, lambda: search.work >= work)
    found = search.frontier.at(limit) or search.frontier.least
    return [judge(step, search.frontier.actions(found))]


class _Others:
    """The other policies' plans, each made when its turn has come: the search ends before where its gap is closed.

    Attributes:
        known: The plans that were made.
    """

    def __init__(self, step: Prepared, budget: Budget) -> None:
        self._step = step
        self._budget = budget
        self.known: list[Timeline] = []
        moves = _moves(step.trace)  # the floor holds for recomputation alone
        hopeless = budget.peak_bytes is not None and not moves and floor_bytes(step) > budget.peak_bytes
        self._left = [policy for policy in POLICIES.values() if _is_asked(policy, step.trace, hopeless=hopeless)]

    def __iter__(self) -> Iterator[Actions]:
        while self._left:
            try:
                self.known.append(self._left.pop(0)(self._step, self._budget))
            except CTDRError:
                continue  # it finds nothing that fits, or no chain
            yield self.known[-1].actions

    def ask_all(self) -> None:
        """Make the plans of all that were not asked yet."""
        for _ in self:
            pass


def _moves(trace: Trace) -> bool:
    """Whether other policies have links or codecs to use that the search of `_smaller` has not."""
    return bool(trace.links) or any(not cost.exact or cost.drops_zeros for cost in trace.codecs)


def _is_asked(policy: Policy, trace: Trace, *, hopeless: bool) -> bool:
    """Whether to look at a policy's plans: a clock's would differ from run to run.

    Where it is proven that nothing fits, most policies search long and find nothing (dtr took 8 s for GPT-2), so only
    those are asked that answer at once.
    """
    if policy.clocked or policy.asks_others or not policy.works_on(trace):
        return False
    return policy.answers_always or not hopeless


def _search(
    step: Prepared, budget: Budget, share: float = 1.0, smaller: Mapping[int, Action] | None = None
) -> LocalSearch:
    n_ops = len(step.trace.ops)
    allowance = share * _patience(budget) * min(WORK_AT_LEAST + WORK_PER_OP * n_ops, MOST_WORK)
    limit_s = SLOWEST * budget.time_limit_s * (1 + n_ops / OPS_PER_TIME_LIMIT)
    return LocalSearch(step, budget.seed, allowance, limit_s, smaller)


def _patience(budget: Budget) -> float:
    return budget.time_limit_s / USUAL_TIME_LIMIT_S


def _rank(made: Timeline, budget: Budget) -> tuple[bool, float, float]:
    """How good a plan is; less is better, and what breaks the budget comes last."""
    if budget.seconds is not None:
        wanted, limit, other = made.seconds, budget.seconds, float(made.peak_bytes)
    else:
        assert budget.peak_bytes is not None
        wanted, limit, other = float(made.peak_bytes), float(budget.peak_bytes), made.seconds
    return (True, wanted, other) if wanted > limit else (False, other, wanted)
