"""Plans of a GPU's step with a forward that the host can keep up with.

No paper. The tape takes some 45 us of the host for each op of the forward that it sees, whereas it sleeps in modules
that the plan leaves alone. A forward of short kernels is over before that, and the GPU waits: a plan of ViT-B/16 that
recomputes 7 % took 51 % longer on an H200. Where the wait is foretold, plans are tried that leave the end of the
forward alone: what is made first lives longest, so that the beginning has the most to free.

Complexity: one search where no wait is foretold; else mostly one or two, each of a smaller step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from ctdr_lightning.memory.plans.plan import host_wait_seconds
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.traces.trace import Trace

# Of the forward's ops, those whose values may be dropped. ViT-B/16 at 60 % of its peak is fastest with the first of
# these, at 40 % with the third, GPT-2 medium at 60 % with the third.
SHARES = (0.5, 0.65, 0.8)
WORTH = 0.02  # a wait of a smaller share of the step is left alone
_ALONE = "left alone, so that the tape sleeps"


def beginnings(step: Prepared) -> dict[Prepared, float]:
    """The step with values that may be dropped in a growing share of the forward alone, the whole one last.

    Args:
        step: The step.

    Returns:
        For each the seconds that its forward waits for the host at most. All but one wait, unless there is one alone.
    """
    trace = step.trace
    shares = (*SHARES, 1.0)
    waits = [host_wait_seconds(trace, int(share * len(trace.forward_ops))) for share in shares]
    if waits[-1] <= WORTH * trace.seconds:
        return {step: waits[-1]}
    first = max((n for n, wait_s in enumerate(waits) if not wait_s), default=0)
    parts = {Prepared(_beginning(trace, share)): wait_s for share, wait_s in zip(SHARES, waits, strict=False)}
    return {**dict(list(parts.items())[first:]), step: waits[-1]}


def quietest(step: Prepared, parts: Mapping[Prepared, float], bound_s: Callable[[Prepared], float]) -> Prepared:
    """The beginning that is foretold to take the least time, the wait for the host included.

    Args:
        step: The whole step.
        parts: Beginnings of it, by growing wait.
        bound_s: Seconds that no plan goes below, without the wait; infinite where there is no plan.
    """
    found, least_s = step, inf
    for part, wait_s in parts.items():
        if step.trace.seconds + wait_s >= least_s:
            break
        foretold_s = bound_s(part) + wait_s
        if foretold_s < least_s:
            found, least_s = part, foretold_s
    return found


def _beginning(trace: Trace, share: float) -> Trace:
    """The step with values that may be dropped in a share of the forward alone."""
    end = trace.forward_ops[int(share * len(trace.forward_ops))]
    return trace.with_pins({v: _ALONE for v, record in enumerate(trace.values) if record.op >= end})
