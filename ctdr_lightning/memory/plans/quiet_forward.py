"""Plans of a GPU's step with a forward that the host can keep up with.

No paper. The tape takes some 45 us of the host for each op of the forward that it sees, whereas it sleeps in modules
that the plan leaves alone. A forward of short kernels is over before that, and the GPU waits: a plan of ViT-B/16 that
recomputes 7 % took 51 % longer on an H200. Where the wait is predicted, plans are tried that leave the end of the
forward alone: what is made first lives longest, so that the beginning has the most to free.

Complexity: as many more plans as there are `SHARES`, each of a smaller step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.trace import Trace

# Of the forward's ops, those whose values may be dropped. ViT-B/16 at 60 % of its peak is fastest with the first of
# these, at 40 % with the second, GPT-2 medium at 60 % with the third.
SHARES = (0.5, 0.65, 0.8)
WORTH = 0.02  # a wait of a smaller share of the step is left alone: a plan takes seconds
_ALONE = "left alone, so that the tape sleeps"


def quieter(
    step: Prepared, made: Plan, choose: Callable[[Prepared], Timeline], flushes: Callable[[Plan], float]
) -> Plan:
    """The fastest plan, the wait for the host included, of one and of those that leave the forward's end alone.

    Args:
        step: The step.
        made: A plan of it.
        choose: Makes a timeline of a step.
        flushes: Times that the allocator gives its segments back in a step under a plan; no more than now are taken.
    """
    if made.host_wait_seconds <= WORTH * made.seconds:
        return made
    found, most = [made], flushes(made)
    for share in SHARES:
        with suppress(InfeasibleBudgetError):
            timeline = choose(Prepared(_beginning(step.trace, share)))
            other = replace(made, timeline=judge(step, timeline.actions))
            found += [other] if other.peak_bytes <= made.peak_bytes and flushes(other) <= most else []
    return min(found, key=lambda plan: plan.wall_seconds)


def _beginning(trace: Trace, share: float) -> Trace:
    """The step with values that may be dropped in a share of the forward alone."""
    end = trace.forward_ops[int(share * len(trace.forward_ops))]
    return trace.with_pins({v: _ALONE for v, record in enumerate(trace.values) if record.op >= end})
