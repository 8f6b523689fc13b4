"""One plan for many shapes: steps that differ in sizes alone share the actions of the first that was planned.

Batches of 60 sequence lengths are 60 kinds of steps. Their traces have one structure, so that the actions of one carry
over to another by the order of the ops. The simulator judges them on the new sizes; they are taken where they fit and
are within 2 % of the new step's own lower bound. They are polished where they are not, and the bound is raised where
that is too little. Only where that fails too, or where CUDA's allocator would not serve the result, is the step planned
by itself. Plans that put values away are below that bound: they are taken where they fit and are as far above the plain
step as the first, to 1 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

from ctdr_lightning.memory.allocator.reserved import is_served
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.search.fastest import Fastest
from ctdr_lightning.memory.search.local_search import LocalSearch
from ctdr_lightning.memory.search.transfer import structure_of, transferred
from ctdr_lightning.memory.simulator.actions import Actions
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.traces.trace import Trace

# A transferred plan may be this much slower than the bound, and so than any plan of the step's own. Where the plan that
# it came from is itself further from its bound, as the bound is loose there, a polished one may be this much further.
GOOD_ENOUGH, FURTHER = 0.02, 0.01
# Plans remembered over all structures; of 60 lengths the nearest of 16 is at most two lengths away.
MOST_REMEMBERED = 16
# Work on polishing a transferred plan: a tenth of the allowance of a small net's search.
POLISH_WORK = 40_000
# From a step, all else that its plan is asked by, and a function that makes it, to the plan.
Share = Callable[[Prepared, Hashable, Callable[[], Plan]], Plan]


def alone(step: Prepared, asked: Hashable, search: Callable[[], Plan]) -> Plan:
    """Make a plan here: the `Share` of a process that trains alone."""
    return search()


@dataclass(frozen=True, slots=True)
class _Known:
    """A plan that was made: for which structure, how large its step is, its actions, its distance to the bound.

    And whether CUDA's allocator serves it: where a search found no such plan, none is asked of other shapes.
    """

    structure: Hashable
    plain_peak_bytes: int
    actions: Actions
    gap: float
    served: bool


class ManyShapes:
    """Plans steps of many shapes under one limit of bytes; remembers a few plans, no traces.

    Args:
        planner: Plans a step by itself.
        policy: Name that plans which are transferred bear.
        share: Makes a plan, or takes that of another process, which is remembered like one that was made here.

    Attributes:
        counts: How many steps were kept plain, had another's plan, had it polished, or were planned by themselves here.

    Example:
        >>> import torch
        >>> from ctdr_lightning import plan, record
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> traces = [record(lambda: net(torch.randn(n, 8)).sum()) for n in (16, 12)]
        >>> shapes = ManyShapes(lambda trace, limit: plan(trace, limit))
        >>> [shapes(trace, 2**20).peak_bytes <= 2**20 for trace in traces]
        [True, True]
    """

    def __init__(self, planner: Callable[[Prepared, int], Plan], policy: str = "auto", share: Share = alone) -> None:
        self._planner = planner
        self._policy, self._share = policy, share
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self.counts = {"plain": 0, "transferred": 0, "polished": 0, "searched": 0}

    @property
    def n_remembered(self) -> int:
        """Number of remembered plans."""
        return len(self._known)

    def __call__(self, step: Trace | Prepared, limit_bytes: int) -> Plan:
        """Plan a step.

        Args:
            step: The recorded step.
            limit_bytes: Largest peak, weights included.

        Raises:
            InfeasibleBudgetError: Where the planner finds nothing that fits.
        """
        step = prepared(step)
        if step.plain_peak_bytes <= limit_bytes and is_served(step.trace, None, limit_bytes):
            self.counts["plain"] += 1
            return Plan(self._policy, simulate(step), limit_bytes, step.trace.seconds)
        structure = structure_of(step.trace)
        made = self._share(step, (self._policy, limit_bytes), partial(self._made, step, limit_bytes, structure))
        self._remember(_Known(structure, step.plain_peak_bytes, made.actions, made.gap, _served(made, limit_bytes)))
        return made

    def _made(self, step: Prepared, limit_bytes: int, structure: Hashable) -> Plan:
        """The nearest plan, or its actions polished, or else a plan of the step's own."""
        nearest = self._nearest(structure, step.plain_peak_bytes)
        made = None if nearest is None else self._adapted(step, limit_bytes, nearest)
        if made is None or nearest is None or (nearest.served and not _served(made, limit_bytes)):
            made = self._planner(step, limit_bytes)
            self.counts["searched"] += 1
        return made

    def _adapted(self, step: Prepared, limit_bytes: int, known: _Known) -> Plan | None:
        """Another step's actions as they are, or polished; None where both are too slow or do not fit."""
        actions, gap = transferred(known.actions, step.trace), max(GOOD_ENOUGH, known.gap + FURTHER)
        carried = Plan(self._policy, simulate(step, actions), limit_bytes)
        # The bound is on recomputation. Of a plan that puts values away, only the plain step bounds the time; one that
        # spares a GPU's host recomputes more than it must. So far above it as the known plan is such a plan may be.
        away, spares_host = bool(carried.away), carried.host_wait_seconds > 0
        bound_s = step.trace.seconds if away else lower_bound_seconds(step, limit_bytes)
        most_s = bound_s * (1 + (gap if away or spares_host else GOOD_ENOUGH))
        if carried.peak_bytes <= limit_bytes and carried.seconds <= most_s:
            self.counts["transferred"] += 1
            return replace(carried, bound_seconds=bound_s)
        if away or spares_host:
            return None
        search = LocalSearch(step, allowance=POLISH_WORK)
        attempt = Fastest(step, search, limit_bytes)
        attempt.polish([actions], gap)
        attempt.start(((1, 0.0),), gap)
        attempt.prove(gap)  # the step's own search would begin with these rounds, and finds them made
        if attempt.found is None or not attempt.within(gap):
            return None
        self.counts["polished"] += 1
        return Plan(self._policy, simulate(step, search.frontier.actions(attempt.found)), limit_bytes, attempt.bound_s)

    def _nearest(self, structure: Hashable, plain_peak_bytes: int) -> _Known | None:
        """The plan of the step that is closest in size; a larger one rather than a smaller, since it fits."""
        alike = [known for known in self._known.values() if known.structure == structure]
        return min(alike, key=lambda k: _distance(k.plain_peak_bytes, plain_peak_bytes), default=None)

    def _remember(self, known: _Known) -> None:
        self._known[known.structure, known.plain_peak_bytes] = known
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)


def _served(made: Plan, limit_bytes: int) -> bool:
    """Whether the allocator serves a plan; asked of it once."""
    return made.once(("served", limit_bytes), lambda: is_served(made.trace, made.actions, limit_bytes))


def _distance(known_bytes: int, wanted_bytes: int) -> float:
    """A plan for a smaller step counts as twice as far: it has to drop more before it fits."""
    return max(known_bytes - wanted_bytes, 2 * (wanted_bytes - known_bytes))
