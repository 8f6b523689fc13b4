"""The default: the best plan at tensor granularity, near its lower bound, by rounding and local search.

No paper. The program behind the lower bound is solved in whole numbers, in rounds that limit bytes where the last plan
broke the budget: each raises the bound and brings a plan. Then the relaxation is rounded to plans, whose long replays
are parted where they do not fit, and which local search over single values (kept, recomputed once, recomputed at each
use; unsaved values such as residual sums held as cheap checkpoints) repairs and fills; then it goes on by random
changes, until the gap to the bound is closed to a quarter of a percent or an allowance of work is spent.

Where values have codecs or links, the same search goes on from the best plan so far, from the plain step and from one
that moves everything, with these as further choices of each value. Where the best of these plans waits for transfers,
the search goes on from the plans of AutoTM and FlashNeuron, too. The bound knows recomputation alone.

The allowance is counted in work, not in seconds, so that the same trace gives the same plan everywhere; the clock only
stops a search that takes far too long, and does not count the rounds, whose programs are limited in size.

Complexity: a linear program of two variables a value, then about linear in the values times the size of their groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import inf

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.bounds.rounds import MOST_ROUNDS
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.belady import swapped
from ctdr_lightning.memory.search.fastest import N_HALVINGS, Fastest, smallest_within
from ctdr_lightning.memory.search.frontier import Others, Point
from ctdr_lightning.memory.search.local_search import LocalSearch
from ctdr_lightning.memory.search.others import codecs_may_pay, free_codecs, moved_to, others_of
from ctdr_lightning.memory.simulator.actions import Actions, Compress, Keep, Offload, Recompute
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.room import with_room
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline

# ``Budget.time_limit_s`` where the user says nothing; another time gets so much more or less of the allowance.
USUAL_TIME_LIMIT_S = 5.0
# Work for the usual time limit: enough for a net of some hundred ops until its gap stays, and more for larger ones. A
# million units take 3 to 4 s; six times as much found nothing better for R at 0.3 and RN18 at 0.4.
# No net gets more than the last: the large LSTM at half its peak found nothing more in 5.3 million than it did in 3.
# GPT-2 of 48 layers got 3.9 before; its plan at 0.3 of its peak is 0.7 % slower now, by this or by `ASCENT_SHARE`.
WORK_AT_LEAST, WORK_PER_OP, MOST_WORK = 600_000, 350, 3_000_000
# The safety stop: so many ops may take as long again as the usual time limit, on a machine a third as fast as that of
# these figures. Without the third, a machine half as fast made another plan of twenty values.
OPS_PER_TIME_LIMIT, SLOWEST = 2_000, 3
# Of the allowance, the share for codecs, and where there are links for both. Codecs alone took up to 4 % on ViT, BERT,
# GPT-2 and GoogLeNet (0.3 s each). With slow links 0.5 finds plans that 0.3 misses (T at 0.4: x1.296 for x1.298).
CODECS_SHARE, LINKS_SHARE = 0.1, 0.5
# A step that takes less than this share longer has nothing to win by them.
WORTH_OTHERS = 0.005
# Of the plans of recomputation that take too much, so many are tried with swaps. Not tuned.
N_SWAPPED = 16
# Policies whose plans are taken, and searched from, where the best plan so far that moves waits for transfers. There
# the search, which moves as much as links hide, was 1.8 % slower than AutoTM's plan (DenseNet's blocks at 0.35, a fast
# link). Elsewhere they win nothing, and took a quarter of the search's time on ResNet-152.
MOVERS = ("autotm", "flashneuron")
# Of the allowance, the share for one more plan for less.
BELOW_SHARE = 0.2
NOTHING = 1e-6  # sums of seconds differ by rounding


@POLICIES.register("auto", uses=frozenset({Keep, Recompute, Offload, Compress}), exact=False)
def auto(step: Prepared, budget: Budget) -> Timeline:
    """The fastest plan whose peak fits, or the one with the least peak that is fast enough.

    With ``budget.seconds`` the peak is made as small as that time allows; with ``budget.peak_bytes`` the time as short
    as that peak allows; with neither everything is kept. If nothing fits, the closest plan is returned.
    """
    return Descent(step, budget).first


class Descent:
    """A plan of ``auto``, and the plans for less that its search goes on to.

    They are for an allocator that cannot serve the first: each takes a fifth of a search, and is about as good as the
    plan of a search of its own.

    Args:
        step: The step to plan.
        budget: Its limits.

    Attributes:
        first: The plan.
    """

    def __init__(self, step: Prepared, budget: Budget) -> None:
        self._step, self._budget = step, budget
        fits = budget.peak_bytes is None or step.plain_peak_bytes <= budget.peak_bytes
        self._is_plain = budget.seconds is None and fits
        self.first = judge(step, {}) if self._is_plain else _best(step, budget, self._search)

    @cached_property
    def _search(self) -> LocalSearch:
        return _search(self._step, self._budget)

    def below(self, limit_bytes: int) -> Timeline | None:
        """A plan for less, made from the fastest for the least more; None where none was found.

        Args:
            limit_bytes: Its peak, below those that were asked for before.
        """
        step, budget = self._step, self._budget
        if floor_bytes(step) > limit_bytes:
            return None
        if step.trace.links or step.trace.codecs:
            made = Descent(step, replace(budget, peak_bytes=limit_bytes)).first
            return made if made.peak_bytes <= limit_bytes else None
        return self._lower(limit_bytes)

    def _lower(self, limit_bytes: int) -> Timeline | None:
        search, frontier = self._search, self._search.frontier
        search.allow(inf)
        nearest = next((point for point in frontier if point.peak_bytes > limit_bytes), None)
        if nearest is not None:
            with search.at_most(BELOW_SHARE):
                search.polish(frontier.actions(nearest), limit_bytes)
        point = frontier.at(limit_bytes)
        return None if point is None else judge(self._step, frontier.actions(point))


def _best(step: Prepared, budget: Budget, search: LocalSearch) -> Timeline:
    """The plan of a whole search."""
    limit = budget.peak_bytes
    if budget.seconds is not None:
        best = smallest_within(step, search, budget.seconds)
    else:
        assert limit is not None
        best = Fastest(step, search, limit, max(1, round(MOST_ROUNDS * _patience(budget)))).run(_evicted(step, budget))
    made = judge(step, search.frontier.actions(best))
    return min([made, *_with_others(step, budget, made, search)], key=lambda plan: _rank(plan, budget))


def _evicted(step: Prepared, budget: Budget) -> Iterator[Actions]:
    """The plan of the online policy, for a search that finds none: DenseNet-121 on small images fits 0.4 from it alone.

    Nothing where no plan can fit: it took 8 s for GPT-2 to find none.
    """
    if budget.peak_bytes is not None and floor_bytes(step) <= budget.peak_bytes:
        with suppress(InfeasibleBudgetError):
            yield POLICIES["dtr"](step, budget).actions


def _with_others(step: Prepared, budget: Budget, made: Timeline, known: LocalSearch) -> list[Timeline]:
    """A plan that also moves values and writes them in fewer bytes; none where that has nothing to win.

    Args:
        step: The step.
        budget: The budget.
        made: The best plan of keeping and recomputing.
        known: The search for it.
    """
    trace, fits = step.trace, not _rank(made, budget)[0]
    others = others_of(step, trace.codecs if fits else trace.asked_codecs)
    if not others or (fits and not _may_pay(step, budget, made)):
        return []
    share = LINKS_SHARE if trace.links else CODECS_SHARE
    search = _search(step, budget, share, others)
    if budget.seconds is not None:
        return [judge(step, search.frontier.actions(_smallest(step, search, made, budget.seconds)))]
    limit = budget.peak_bytes
    assert limit is not None
    starts = [{}, made.actions, *(moved_to(others, link.to) for link in trace.links)]
    starts += [swapped(step, limit, {})] if trace.links else []
    found = _best_from(search, starts, limit, trace.seconds, work=None if trace.links else known.work)
    plans = [judge(step, search.frontier.actions(found))]
    if trace.links:
        plans += [*_with_room(step, search, limit), *_swapped(step, known, limit)]
        if min(plans, key=lambda plan: _rank(plan, budget)).transfers.waits_s > WORTH_OTHERS * trace.seconds:
            plans += _from_movers(step, budget, others)
    return plans


def _from_movers(step: Prepared, budget: Budget, others: Others) -> Iterator[Timeline]:
    """Plans of policies that move alone, and those that a search of its own passes on its way from each."""
    limit = budget.peak_bytes
    assert limit is not None
    for name in MOVERS:
        with suppress(InfeasibleBudgetError):
            made = POLICIES[name](step, budget)
            search = _search(step, budget, LINKS_SHARE, others)
            search.polish(made.actions, limit)
            yield from [made, *_with_room(step, search, limit)]


def _with_room(step: Prepared, search: LocalSearch, limit: int) -> Iterator[Timeline]:
    """Plans that take too many bytes, with waits for transfers: the search moves only as far as links hide it."""
    for point in search.frontier:
        if point.peak_bytes > limit:
            yield judge(step, with_room(step, search.frontier.actions(point), limit))


def _swapped(step: Prepared, known: LocalSearch, limit: int) -> Iterator[Timeline]:
    """The plain step and plans of recomputation that take too many bytes, with what they keep swapped."""
    over = [known.frontier.actions(point) for point in known.frontier if point.peak_bytes > limit]
    for actions in ({}, *over[:: max(1, len(over) // N_SWAPPED)]):
        yield judge(step, with_room(step, swapped(step, limit, actions), limit))


def _may_pay(step: Prepared, budget: Budget, made: Timeline) -> bool:
    """Whether a plan that fits has time or bytes to win by codecs or links."""
    if budget.seconds is not None:
        return bool(step.trace.links or step.trace.asked_codecs)
    if made.seconds <= step.trace.seconds * (1 + WORTH_OTHERS):
        return False
    return bool(step.trace.links) or codecs_may_pay(step, made.actions, free_codecs(step.trace))


def _best_from(search: LocalSearch, starts: list[Actions], limit: int, plain_s: float, work: int | None) -> Point:
    """The best plan under a limit, from several starts.

    It is the first that takes no longer than the plain step: another moves more for nothing.

    Args:
        search: Where plans are tried.
        starts: The plans to go on from.
        limit: Largest peak, weights included.
        plain_s: Time of the plain step.
        work: No more is spent on random changes; None for all that is allowed.
    """

    def enough() -> bool:
        found = search.frontier.at(limit)
        return found is not None and found.seconds <= plain_s * (1 + NOTHING)

    for actions in starts:
        if not enough():
            search.polish(actions, limit)
    if search.frontier.at(limit) is None:
        search.deepen(lambda point: point.peak_bytes <= limit)
    search.improve(limit, lambda: enough() or (work is not None and search.work >= work))
    return search.frontier.at(limit) or search.frontier.least


def _smallest(step: Prepared, search: LocalSearch, made: Timeline, seconds: float) -> Point:
    """The plan with the least peak that takes no longer, by halving the peaks below the one that is known."""
    low, high = step.trace.resident_bytes, made.peak_bytes
    search.polish(made.actions, high)
    for _ in range(N_HALVINGS):
        middle = (low + high) // 2
        search.polish({}, middle)
        found = search.frontier.at(middle)
        low, high = (low, middle) if found and found.seconds <= seconds else (middle, high)
    point = search.frontier.within(seconds)
    assert point is not None  # the plan that is known at least
    return point


def _search(step: Prepared, budget: Budget, share: float = 1.0, others: Others | None = None) -> LocalSearch:
    n_ops = len(step.trace.ops)
    allowance = share * _patience(budget) * min(WORK_AT_LEAST + WORK_PER_OP * n_ops, MOST_WORK)
    limit_s = SLOWEST * budget.time_limit_s * (1 + n_ops / OPS_PER_TIME_LIMIT)
    return LocalSearch(step, budget.seed, allowance, limit_s, others)


def _patience(budget: Budget) -> float:
    return budget.time_limit_s / USUAL_TIME_LIMIT_S


def _rank(made: Timeline, budget: Budget) -> tuple[bool, float, float]:
    """Sort key of a plan; less is better, and plans over the budget come last."""
    if budget.seconds is not None:
        wanted, limit, other = made.seconds, budget.seconds, float(made.peak_bytes)
    else:
        assert budget.peak_bytes is not None
        wanted, limit, other = float(made.peak_bytes), float(budget.peak_bytes), made.seconds
    return (True, wanted, other) if wanted > limit else (False, other, wanted)
