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
from ctdr_lightning.memory.plans.actions import Actions, Compress, Keep, Offload, Recompute
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.together import put_away
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline

RECOMPUTES = "capuchin"  # the fastest of the policies that come near the best plan of recomputation
# How far recomputation goes before the rest is moved, besides not at all: half of the way to the budget, all of it.
STEPS = (0.5, 1.0)
# Not tuned.
# Peaks that are tried where seconds are limited, as shares of the plain peak above what is resident.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@POLICIES.register("together", uses=frozenset({Keep, Recompute, Offload, Compress}))
def together(step: Prepared, budget: Budget) -> Timeline:
    """Move, compress and recompute, whatever the budget asks for.

    Raises:
        InfeasibleBudgetError: When no plan fits.
    """
    return choose(step, _plans(step, budget), budget, "together")


def _plans(step: Prepared, budget: Budget) -> Iterator[Actions | Timeline]:
    yield {}
    trace = step.trace
    if not trace.links and not trace.codecs:
        return  # nothing but recomputation is possible, which other policies are for
    plain = step.plain_peak_bytes
    above = plain - trace.resident_bytes
    limits = [trace.resident_bytes + int(share * above) for share in SHARES]
    for limit in limits if budget.peak_bytes is None else [budget.peak_bytes]:
        if limit < plain:
            starts = list(_starts(step, budget, plain, limit))
            yield from starts
            yield from put_away(step, [start.actions for start in starts], limit)


def _starts(step: Prepared, budget: Budget, plain: int, limit: int) -> Iterator[Timeline]:
    """Plans of recomputation on the way from the plain peak to the wanted one."""
    yield judge(step, {})
    for share in STEPS:
        wanted = replace(budget, peak_bytes=plain - int(share * (plain - limit)), seconds=None)
        try:
            yield POLICIES[RECOMPUTES](step, wanted)
        except CTDRError:
            return  # it goes no further
