"""Checkmate, by mixed integer programming.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, arXiv 1910.02653.

Reproduced: the optimum over all tensors by mixed integer programming, with the paper's R (runs again in a stage), S (is
    held from stage to stage) and U (bytes) and its constraints; the paper's program itself, op by op and with FREE, is
    in ``benchmarks.checkmate_tableau`` for plain graphs.
Modelled: ops are grouped to stages, as a program of one stage an op (a million rows for ResNet-50) takes hours: the
    forward is one stage, and the backward is divided where bytes are scarce. Bytes between the ends of
    stages are judged by the simulator; where it finds too many, a stage is divided there or its limit lowered, and the
    program is solved again. While no such cut was needed the solution is the optimum of the tape.
Left out: running ops again in the forward. Where the time limit does not suffice the relaxation is rounded, as in the
    paper's approximation, and the result then depends on the machine's speed.

Complexity: exponential at worst; a second for nets of 100 ops, some for those of 300.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from ctdr_lightning.memory.bounds.staged_program import StagedProgram, choose_ticks, lives_of
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.simulator.actions import RECOMPUTE, Action, Actions
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.trace import Trace

# The program starts with bytes limited at three ticks and gets more where the simulator finds too many: its time grows
# faster than linearly with them. These numbers are not tuned.
FIRST_TICKS = 3
GAP = 0.01  # of the seconds that are recomputed: the solver proves the last percent far longer than it finds it
# Of the bytes above the weights: a smaller excess lowers all limits, by so much more than it, so that rounds end.
SMALL_EXCESS, STEP = 0.02, 0.003
THRESHOLDS = (0.2, 0.4, 0.5, 0.6, 0.8)
N_ROUNDS = 12  # each divides a stage or lowers limits; the time limit ends them earlier on larger nets
N_HALVINGS = 6  # for a plan within a time: 2 % of the bytes between nothing and the plain peak


@POLICIES.register("checkmate", clocked=True)
def checkmate(step: Prepared, budget: Budget) -> Timeline:
    """Solve a mixed integer program for the fastest plan whose peak fits.

    With a limit on seconds alone, the lowest of a few peaks whose plan is fast enough; with no limit, keep everything.
    """
    trace, peak_bytes = step.trace, step.plain_peak_bytes
    if budget.peak_bytes is not None and budget.peak_bytes < peak_bytes:
        stop_s = time.perf_counter() + budget.time_limit_s
        found = list(_plans(step, budget.peak_bytes, stop_s))
        return choose(step, [*found] or [dict.fromkeys(trace.saved, RECOMPUTE)], budget, "checkmate")
    if budget.seconds is None:
        return judge(step, {})
    candidates: list[Actions | Timeline] = [{}]
    low, high = trace.resident_bytes, peak_bytes
    for _ in range(N_HALVINGS):
        middle = (low + high) // 2
        found = list(_plans(step, middle, time.perf_counter() + budget.time_limit_s / N_HALVINGS))
        fits = any(t.peak_bytes <= middle and t.seconds <= budget.seconds for t in found)
        low, high = (low, middle) if fits else (middle, high)
        candidates += found
    return choose(step, candidates, budget, "checkmate")


def _plans(step: Prepared, peak_bytes: int, stop_s: float) -> Iterator[Timeline]:
    """Solve, simulate, limit bytes where too many were found, until a plan fits: in shares, then in whole numbers."""
    trace, lives = step.trace, lives_of(step)
    for whole in (False, True):
        margins = dict.fromkeys(choose_ticks(trace, step.plain_bytes_at, peak_bytes, FIRST_TICKS), 0)
        for _ in range(N_ROUNDS):
            staged = StagedProgram(trace, sorted(margins), peak_bytes, lives, margins)
            found = [judge(step, actions) for actions in _solutions(staged, whole, stop_s)]
            yield from found
            live = min((timeline.bytes_at for timeline in found), key=np.max, default=None)
            if live is None or live.max() <= peak_bytes or time.perf_counter() > stop_s:
                break
            _tighten(trace, margins, live, peak_bytes)


def _solutions(staged: StagedProgram, whole: bool, stop_s: float) -> list[dict[int, Action]]:
    if whole:
        solution = staged.program.solve(stop_s - time.perf_counter(), GAP)
        return [] if solution is None else [staged.actions_of(solution.values, 0.5)]
    solution = staged.program.relax()
    return [] if solution is None else [staged.actions_of(solution.values, t) for t in THRESHOLDS]


def _tighten(trace: Trace, margins: dict[int, int], live: np.ndarray, peak_bytes: int) -> None:
    """Lower all limits by a small excess; else limit bytes at the worst op too, or lower the limit there."""
    excess = int(live.max()) - peak_bytes
    room = peak_bytes - trace.resident_bytes
    ticks = sorted(op.tick for op in trace.ops)
    worst = ticks[min(bisect_left(ticks, int(live.argmax())), len(ticks) - 1)]
    if excess <= SMALL_EXCESS * room:
        lower = excess + int(STEP * room)
        margins.update({tick: margin + lower for tick, margin in margins.items()})
    else:
        margins[worst] = margins[worst] + excess if worst in margins else 0
