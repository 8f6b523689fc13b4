"""Bounds that hold for every plan: a lower bound on seconds at a budget, and the floor of memory.

Both hold for every plan of the tape that keeps and recomputes, at tensor granularity; offload and compression are not
covered. The bound is the relaxation of the staged program (see ``staged_program``), which is Checkmate's (Jain et al.,
MLSys 2020) with bytes limited at a few ticks. One tick, where the plain step is highest, gives most of it: a value
that is not held there must be recomputed at least once, from values that are held. So it takes 0.2 s for ResNet-50,
whose full tableau has a million rows; near linear in ops. Where the forward is much higher than the backward, both have
a tick, each in a program of its own. With one tick alone the program is nearly a knapsack, which is solved in whole
numbers too: where few large tensors fit, half a tensor more or less is most of the distance to the best plan. Where
more ticks bind, ``auto`` goes on in rounds (see ``rounds``), which raise the bound and bring plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ctdr_lightning.memory.bounds.rounds import rounds_of
from ctdr_lightning.memory.bounds.staged_program import StagedProgram, choose_ticks, least_bytes_at, lives_of
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.traces.trace import Trace

# One tick gives most of the bound; 4 raised it by 0.2 % of the step for the small TreeLSTM at half its peak, 16 by as
# much again, but in 32 s instead of half a second.
TICKS = (1, 4, 16)
# Ops of the forward times ticks; beyond, fewer ticks: the program of 5,500 variables takes 0.5 s, of 21,000 32 s.
MANY_VARIABLES = 5000
# Share of a step; more ticks are tried for as long as they raise the bound by this much.
WORTHWHILE = 1e-3
# The one tick is the backward's highest. Where the forward breaks the budget by more than so many times as much, its
# highest is tried alone, too: of 16 nets this is so for the large LSTM, whose bound it raises by 1 to 6 % of the step;
# elsewhere, below 1.06 times, it is the same tick or moves the bound by 0.5 % at most, mostly down.
MUCH_HIGHER = 1.1


def lower_bound_seconds(step: Trace | Prepared, peak_bytes: int) -> float:
    """Seconds that no plan goes below whose peak is at most ``peak_bytes``; infinite where there is no such plan.

    Args:
        step: The recorded step.
        peak_bytes: Budget on the simulated peak, weights included.
    """
    step = prepared(step)
    return step.once(("bound", peak_bytes), lambda: _bound_s(step, peak_bytes))


def _bound_s(step: Prepared, peak_bytes: int) -> float:
    trace = step.trace
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
        for ticks in _limited_ticks(step, peak_bytes, n_ticks):
            relaxed = StagedProgram(trace, ticks, peak_bytes, lives).program.relax()
            if relaxed is None:
                return float("inf")
            share = max(share, relaxed.bound)
    first = next(iter(rounds_of(step, peak_bytes)))
    return max(trace.seconds * (1 + share), first.bound_seconds)


def _limited_ticks(step: Prepared, peak_bytes: int, n_ticks: int) -> Iterator[list[int]]:
    """The ticks at which each program of so many limits bytes."""
    bytes_at = step.plain_bytes_at
    ticks = choose_ticks(step.trace, bytes_at, peak_bytes, n_ticks)
    yield ticks
    if n_ticks > 1:  # then the forward's highest is among them
        return
    highest = max((op.tick for op in step.trace.ops), key=lambda tick: bytes_at[tick])
    excess_bytes = max((int(bytes_at[tick]) for tick in ticks), default=peak_bytes) - peak_bytes
    if bytes_at[highest] - peak_bytes > MUCH_HIGHER * excess_bytes:
        yield [highest]


def sharp_bound_seconds(step: Prepared, peak_bytes: int) -> float:
    """The best lower bound so far: the usual one, and that of the rounds that were made in search of a plan."""
    return max(lower_bound_seconds(step, peak_bytes), rounds_of(step, peak_bytes).bound_seconds)


def floor_bytes(step: Trace | Prepared) -> int:
    """Bytes that no plan's peak goes below: the program's tensors and one op's operands, at the worst tick. Linear."""
    step = prepared(step)
    return int(least_bytes_at(step).max(initial=step.trace.resident_bytes))


def highest_tick(step: Trace | Prepared) -> int:
    """The first tick at which no plan goes below these bytes; 0 for an empty step."""
    least = least_bytes_at(step)
    return int(least.argmax()) if len(least) else 0


def held_by_the_program(trace: Trace) -> int:
    """The peak if nothing that autograd saved took any memory: no place and no codec goes below."""
    bare = replace(trace, values=tuple(replace(value, saves=()) for value in trace.values))
    return int(lives_of(bare).bytes_at.max(initial=trace.resident_bytes))
