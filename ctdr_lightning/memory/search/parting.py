"""Relaxed plans whose long replays are parted: values are held where the fewest bytes cross, until the plan fits.

The relaxation knows nothing of the bytes of replays. At low budgets it drops whole chains, such as the states of an
LSTM: the first of them that the backward asks for replays all of them, and the rounded plan exceeds the budget by up to
80 % of the plain peak. Single moves repair that slowly, as each of them plays the chain. Here the replay that
puts most bytes at the worst tick is parted near its middle: values that its first ops make and its last ones read are
held.

Held values take bytes where the plain step is highest. So relaxations of lower budgets are parted too, and the one by
which a plan just fits is found by bisection.

Complexity: a linear program a halving; for each parting one play of its group, and a look at all replays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from ctdr_lightning.memory.search.rounding import relaxed_plans
from ctdr_lightning.memory.simulator.actions import KEEP, Action, Actions, action_of
from ctdr_lightning.memory.simulator.effect import Effect
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

# The lowest budget that is tried, by a share of the plain peak above the weights, and halvings up to there: a step of
# 1 %. The large LSTM's margins are 0.11 to 0.13, the TreeLSTM's 0.03 to 0.13.
MOST_MARGIN, N_HALVINGS = 0.32, 5
# The TreeLSTM at 0.2 of its peak is parted 43 times, the large LSTM 16 times.
MOST_PARTINGS = 80
# Around the middle of a replay, the share of its ops at which it may be parted. Not tuned.
AROUND = 0.4
# Plans that are polished; the others are further from fitting, or slower.
MOST_PLANS = 3
# Price of a byte over the budget, relative to the mean price of a byte from the plain peak down to the budget: the last
# bytes are the dearest. Not tuned.
DEAR = 5.0


def parted_plans(step: Prepared, budget_bytes: int, bound_s: float) -> list[Actions]:
    """Relaxations at a budget and below, rounded and parted.

    Args:
        step: The recorded step.
        budget_bytes: Largest peak allowed.
        bound_s: Seconds that no plan goes below.

    Returns:
        Plans that fit or nearly do, the most promising first.
    """
    price = DEAR * (bound_s - step.trace.seconds) / max(step.plain_peak_bytes - budget_bytes, 1)
    found: list[tuple[float, int, Actions]] = []
    low, high, margin = 0.0, MOST_MARGIN, 0.0
    for n in range(N_HALVINGS + 1):
        relaxed = next(relaxed_plans(step, budget_bytes, [(1, margin)], [0.5]), None)
        fits = relaxed is None
        if relaxed is not None:
            made = _parted(step, relaxed, budget_bytes)
            excess = max(made.peak_bytes - budget_bytes, 0)
            found.append((made.seconds + price * excess, n, dict(made.actions)))
            fits = not excess
        if fits and not margin:
            break
        low, high = (low, margin) if fits else (margin, high)
        margin = (low + high) / 2
    return [actions for _, _, actions in sorted(found, key=lambda plan: plan[:2])[:MOST_PLANS]]


def _parted(step: Prepared, actions: Actions, budget_bytes: int) -> Simulator:
    """A plan whose replays are parted until it fits or no parting is left."""
    simulator = Simulator(step, actions)
    for _ in range(MOST_PARTINGS):
        if simulator.peak_bytes <= budget_bytes or not (held := _checkpoints(simulator)):
            break
        simulator.change(held)
    return simulator


def _checkpoints(simulator: Simulator) -> dict[int, Action]:
    """Actions that hold values so that the largest replay at the worst tick falls in two; empty if there are none."""
    tick = int(simulator.bytes_at().argmax())
    effects, _ = simulator.effects()
    there = [(n_bytes, effect) for effect in effects if (n_bytes := effect.bytes_at(tick))]
    for _, effect in sorted(there, key=lambda one: -one[0]):
        crossing = _crossing(simulator.trace, _replay_at(effect, tick))
        held: dict[int, Action] = {
            v: KEEP for v in crossing if action_of(simulator.trace, simulator.actions, v) != KEEP
        }
        if held:
            return held
    return {}


def _replay_at(effect: Effect, tick: int) -> list[int]:
    """The ops of a group's replay at a tick; where there is none, of the longest before it, whose values may stay."""
    found = [(at == tick, len(ops), ops) for at, _, ops in effect.replays if at <= tick]
    return max(found, default=(False, 0, []))[2]


def _crossing(trace: Trace, ops: Sequence[int]) -> list[int]:
    """The values that cross a replay where they are the fewest bytes: made before that place and read after it.

    Args:
        trace: The recorded step.
        ops: The ops of the replay, rising.
    """
    read_by: dict[int, int] = {}  # by value the last op of the replay that reads it, as its place in the replay
    inside = set(ops)
    for place, op in enumerate(ops):
        for value in trace.ops[op].inputs:
            if value in trace.droppable and value not in trace.unholdable and trace.values[value].op in inside:
                read_by[value] = place
    made_by = {value: bisect_right(ops, trace.values[value].op) for value in read_by}
    steps = np.zeros(len(ops) + 2, dtype=np.int64)
    for value, last in read_by.items():
        steps[made_by[value]] += trace.value_bytes(value)
        steps[last + 1] -= trace.value_bytes(value)
    first, end = max(int((1 - AROUND) / 2 * len(ops)), 1), int((1 + AROUND) / 2 * len(ops)) + 1
    around = np.cumsum(steps)[first : min(end, len(ops))]
    if not len(around):
        return []
    where = first + int(around.argmin())
    return [value for value, last in read_by.items() if made_by[value] <= where <= last]
