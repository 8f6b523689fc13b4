"""Keep, recompute, offload and compress in one plan; ``auto`` looks at it wherever the machine has links or codecs.

No paper. From Capuchin's plans of recomputation at several peaks, the plain step among them, exact codecs that cost
next to nothing are put on what is kept, and what is live at the peak is moved, the earliest made first, until the peak
fits (see ``search.together``). The simulator, with its lanes, judges all of them.

Complexity: a few dozen simulations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.together import put_away
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

RECOMPUTES = "capuchin"  # the fastest of the policies that come near the best plan of recomputation
# How far recomputation goes before the rest is moved: not at all, half of the way to the budget, all of the way.
STEPS = (0.0, 0.5, 1.0)
# Peaks that are tried where seconds are limited, as shares of the plain peak above what is resident.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@POLICIES.register("together")
def together(trace: Trace, budget: Budget) -> Actions:
    """Move, compress and recompute, whatever the budget asks for.

    Raises:
        InfeasibleBudgetError: When no plan fits.
    """
    return choose(trace, _plans(trace, budget), budget, "together")


def _plans(trace: Trace, budget: Budget) -> Iterator[Actions]:
    yield {}
    if not trace.links and not trace.codecs:
        return  # nothing but recomputation is possible, which other policies are for
    plain = Simulator(trace).peak_bytes
    above = plain - trace.resident_bytes
    limits = [trace.resident_bytes + int(share * above) for share in SHARES]
    for limit in limits if budget.peak_bytes is None else [budget.peak_bytes]:
        if limit < plain:
            starts = list(_starts(trace, budget, plain, limit))
            yield from starts
            yield from put_away(trace, starts, limit)


def _starts(trace: Trace, budget: Budget, plain: int, limit: int) -> Iterator[Actions]:
    """Plans of recomputation on the way from the plain peak to the wanted one."""
    for step in STEPS:
        if not step:
            yield {}
            continue
        wanted = replace(budget, peak_bytes=plain - int(step * (plain - limit)), seconds=None)
        try:
            yield POLICIES[RECOMPUTES](trace, wanted)
        except CTDRError:
            return  # it goes no further
