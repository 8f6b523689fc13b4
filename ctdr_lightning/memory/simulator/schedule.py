"""Ticks at which each value is sent away and asked back, where a plan leaves them open.

Out: sent as soon as its op has run, and waited for at the first op by which its lane has it away. Back: asked for at
the latest tick that the tape hears and that still hides the transfer, the last needed value first. So both directions'
memory follows from the link, and the step waits only where the link is too slow; ``room`` adds the waits for room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from ctdr_lightning.memory.simulator.actions import Action, Actions, Offload, away_values
from ctdr_lightning.memory.simulator.away import away_bytes, link_to
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.trace import Trace

# A link is at times slower than it was measured. With transfers planned a quarter longer than they are simulated, the
# step waited on no disk read of BIG at half its peak; without the margin it waited 4 % of its time.
SLACK = 1.25


def scheduled(step: Trace | Prepared, actions: Actions) -> dict[int, Action]:
    """The same actions with every tick settled.

    Args:
        step: The recorded step, with its links.
        actions: By value id; an ``Offload`` may leave its ticks open.

    Returns:
        Actions in which no offloaded value has an open tick.
    """
    moved = _moved(prepared(step).trace, actions)
    if not any(min(a.out_at, a.gone_by, a.back_at) < 0 for a in moved.values()):
        return dict(actions)
    return dict(actions) | settled(Simulator(step, actions), actions)


def settled(simulator: Simulator, actions: Actions) -> dict[int, Action]:
    """The offloaded values' actions, with every tick settled.

    Args:
        simulator: A simulator of the actions, whatever their ticks are there.
        actions: By value id; an ``Offload`` may leave its ticks open.
    """
    trace, found = simulator.trace, dict[int, Action]()
    moved = _moved(trace, actions)
    starts_s = simulator.base_starts_s()
    for to in {action.to for action in moved.values()}:
        mine = {v: a for v, a in moved.items() if a.to == to}
        sent = _send(trace, mine, starts_s)
        found.update(_ask_back(trace, sent, simulator, starts_s))
    return found


def _moved(trace: Trace, actions: Actions) -> dict[int, Offload]:
    return {v: a for v, a in away_values(trace, actions).items() if isinstance(a, Offload)}


def judge(step: Trace | Prepared, actions: Actions) -> Timeline:
    """Simulate actions with every tick settled, as a plan needs them."""
    return Simulator(step, scheduled(step, actions)).timeline()


def _send(trace: Trace, moved: dict[int, Offload], starts_s: np.ndarray) -> dict[int, Offload]:
    """Settle when values go and by when they are gone, in the order in which they go."""
    ticks = [trace.ops[index].tick for index in trace.forward_ops]
    outs = {v: max(a.out_at, trace.ops[trace.values[v].op].tick) for v, a in moved.items()}
    free_s, found = 0.0, {}
    for value in sorted(moved, key=lambda v: (outs[v], v)):
        action = moved[value]
        seconds = link_to(trace, action.to).seconds(away_bytes(trace, value, action.codecs))[0]
        free_s = max(free_s, float(starts_s[outs[value] + 1])) + SLACK * seconds
        away = _first_tick_after(ticks, starts_s, free_s)
        gone = action.gone_by if action.gone_by >= 0 else max(away, outs[value])
        found[value] = replace(action, out_at=outs[value], gone_by=gone)
    return found


def _first_tick_after(ticks: list[int], starts_s: np.ndarray, when_s: float) -> int:
    """The first forward op that ends at or after a time; the last op where none does."""
    place = bisect_left(ticks, when_s, key=lambda tick: float(starts_s[tick + 1]))
    return ticks[min(place, len(ticks) - 1)]


def _ask_back(
    trace: Trace, moved: dict[int, Offload], simulator: Simulator, starts_s: np.ndarray
) -> Iterable[tuple[int, Offload]]:
    """Settle when values are asked back, the last needed first."""
    bells = sorted(bells_of(trace))
    needs = {v: n for v in moved if (n := simulator.needed(v)[0]) is not None}
    lane_s = float("inf")
    for value in sorted(needs, key=lambda v: (-needs[v], v)):
        action = moved[value]
        seconds = link_to(trace, action.to).seconds(away_bytes(trace, value, action.codecs))[1]
        lane_s = min(lane_s, float(starts_s[needs[value]])) - SLACK * seconds
        place = bisect_right(bells, lane_s, key=lambda tick: float(starts_s[tick])) - 1
        heard = bells[max(place, 0)] if bells else needs[value]
        back = action.back_at if action.back_at >= 0 else min(max(heard, action.gone_by + 1), needs[value])
        yield value, replace(action, back_at=back)
    yield from ((v, a) for v, a in moved.items() if v not in needs)


class HasActions(Protocol):
    """A plan, as far as the simulator looks at it."""

    @property
    def actions(self) -> Actions:
        """From value id to action."""
        ...


def simulate(step: Trace | Prepared, plan: HasActions | Actions | None = None) -> Timeline:
    """Predict a step under a plan.

    Args:
        step: The recorded step.
        plan: A plan, or actions by value id; None for the plain step.

    Returns:
        The timeline: ``peak_bytes``, ``seconds``, ``recompute_seconds``, the bytes at each tick.
    """
    actions = plan if plan is None or isinstance(plan, Mapping) else plan.actions
    return Simulator(step, actions).timeline()
