"""What no plan can beat: a lower bound on seconds at a budget, and the floor of memory.

Both hold for every plan of the tape that keeps and recomputes, at tensor granularity; offload and compression are not
covered. The bound is the relaxation of the staged program (see ``staged``), which is Checkmate's (Jain et al., MLSys
2020) with bytes limited at a few ticks. One tick, where the plain step is highest, gives most of it: what is not held
there must be made again at least once, from what is held. So it takes 0.2 s for ResNet-50, whose full tableau has a
million rows; near linear in ops. With that tick alone the program is nearly a knapsack, which is solved in whole
numbers too: where few large tensors fit, half a tensor more or less is most of the distance to the best plan.
"""

from __future__ import annotations

import numpy as np

from ctdr_lightning.memory.bounds.linear_program import Solution
from ctdr_lightning.memory.bounds.staged_program import Lives, StagedProgram, choose_ticks, lives_of
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.traces.trace import Trace

# One tick gives most of the bound; 4 raised it by 0.2 % of the step for the small TreeLSTM at half its peak, 16 by as
# much again, but in 32 s instead of half a second.
TICKS = (1, 4, 16)
# Ops of the forward times ticks; beyond, fewer ticks: the program of 5,500 variables takes 0.5 s, of 21,000 32 s.
MANY_VARIABLES = 5000
# Share of a step; more ticks are tried for as long as they raise the bound by this much.
WORTHWHILE = 1e-3
# Of the seconds that are recomputed, and nodes of the search tree: most programs are solved at its root. The limit
# keeps the others short, and is no clock, so that a trace has one bound.
WHOLE_GAP, WHOLE_NODES = 1e-3, 50
# Share of a step by which the solver's bound may be off: its tolerances.
TOLERANCE = 1e-6


def lower_bound_seconds(step: Trace | Prepared, peak_bytes: int) -> float:
    """Seconds that no plan goes below whose peak is at most ``peak_bytes``; infinite where there is no such plan.

    Args:
        step: The recorded step.
        peak_bytes: Budget on the simulated peak, weights included.
    """
    step = prepared(step)
    return step.once(("bound", peak_bytes), lambda: _bound_s(step, peak_bytes))


def _bound_s(step: Prepared, peak_bytes: int) -> float:
    trace, bytes_at = step.trace, step.plain_bytes_at
    if step.plain_peak_bytes <= peak_bytes:
        return trace.seconds
    lives = lives_of(step)
    if floor_bytes(step) > peak_bytes:
        return float("inf")
    share, before = 0.0, -1.0
    for n_ticks in TICKS:
        if share < before + WORTHWHILE or (n_ticks > 1 and n_ticks * len(trace.forward_ops) > MANY_VARIABLES):
            break
        before = share
        ticks = choose_ticks(trace, bytes_at, peak_bytes, n_ticks)
        relaxed = StagedProgram(trace, ticks, peak_bytes, lives).program.relax()
        if relaxed is None:
            return float("inf")
        share = max(share, relaxed.bound)
    whole = whole_numbers(step, peak_bytes)[1]
    return trace.seconds * (1 + max(share, whole.bound - TOLERANCE if whole is not None else 0.0))


def whole_numbers(step: Prepared, peak_bytes: int) -> tuple[StagedProgram, Solution | None]:
    """The program with bytes limited at one tick, and what was found in whole numbers; once for a peak."""

    def solve() -> tuple[StagedProgram, Solution | None]:
        ticks = choose_ticks(step.trace, step.plain_bytes_at, peak_bytes, 1)
        staged = StagedProgram(step.trace, ticks, peak_bytes, lives_of(step))
        return staged, staged.program.solve(float("inf"), WHOLE_GAP, WHOLE_NODES)

    return step.once(("whole", peak_bytes), solve)


def floor_bytes(step: Trace | Prepared) -> int:
    """Bytes that no plan's peak goes below: at some tick, what the program holds and what its op works on. Linear."""
    step = prepared(step)
    return step.once("floor", lambda: _floor(step.trace, lives_of(step)))


def _floor(trace: Trace, lives: Lives) -> int:
    spans: dict[int, list[tuple[int, int]]] = {}
    for value in trace.saved:
        place = trace.values[value].storage
        for save in trace.values[value].saves if value in trace.droppable else ():
            asked = [t for t in save.unpacked if t > lives.available[value]]
            if asked:
                spans.setdefault(place, []).append((max(min(asked), lives.ends[place]) + 1, save.released))
    steps = np.zeros(trace.n_ticks + 1, dtype=np.int64)
    for place, worked_on in spans.items():
        end = -1
        for first, last in sorted(worked_on):
            first, end = max(first, end + 1), max(end, last)
            if first <= end:
                steps[first] += trace.storages[place].n_bytes
                steps[end + 1] -= trace.storages[place].n_bytes
    return int((lives.bytes_at + np.cumsum(steps)[:-1]).max(initial=trace.resident_bytes))
