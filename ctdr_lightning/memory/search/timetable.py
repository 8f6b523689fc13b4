"""Links as a search sees them: where one more transfer finds room, and by how much it would delay the step.

The transfers of a plan share two lanes a link, one away and one back. ``settle`` gives those of the present plan their
ticks; ``place`` estimates the ticks and the delay of one more without playing the others again. The simulator plays
each change that is made, so an estimate costs time at most.

Complexity: a settling is O(n log n) in the values on the link; a placing O(log n).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

import numpy as np

from ctdr_lightning.memory.simulator.actions import Action, Offload
from ctdr_lightning.memory.simulator.away import away_bytes, link_to
from ctdr_lightning.memory.simulator.schedule import SLACK, settled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.bells import bells_of, heard_before


class Timetable:
    """One link under the present plan.

    Args:
        simulator: The present plan.
        to: The link's holder.
    """

    def __init__(self, simulator: Simulator, to: str) -> None:
        self._simulator = simulator
        self._trace = trace = simulator.trace
        self._to, self._link = to, link_to(trace, to)
        self._ticks = [trace.ops[index].tick for index in trace.forward_ops]
        self._bells = sorted(bells_of(trace))
        self._seconds: dict[tuple[int, tuple[str, ...]], tuple[float, float]] = {}
        self._measure({})

    def settle(self, actions: Mapping[int, Action]) -> dict[int, Action]:
        """The ticks of everything that a plan moves over the link.

        Args:
            actions: The plan's, their ticks open.
        """
        moved = {v: a for v, a in actions.items() if isinstance(a, Offload) and a.to == self._to}
        found = settled(self._simulator, moved) if moved else {}
        self._measure({v: a for v, a in found.items() if isinstance(a, Offload)})
        return found

    def _measure(self, moved: Mapping[int, Offload]) -> None:
        """Note when the transfers of the plan leave the lanes free."""
        self._starts_s = self._simulator.base_starts_s()
        self._outs: list[tuple[int, float]] = []
        free_s = 0.0
        for value in sorted(moved, key=lambda v: (moved[v].out_at, v)):
            free_s = max(free_s, self._start_s(moved[value].out_at + 1)) + self._lasts(value, moved[value])[0]
            self._outs.append((moved[value].out_at, free_s))
        self._late_s = max(free_s - self._start_s(self._ticks[-1] + 1), 0.0)
        self._measure_back(moved)

    def _measure_back(self, moved: Mapping[int, Offload]) -> None:
        needs = {v: n for v in moved if (n := self._simulator.needed(v)[0]) is not None}
        order = sorted(needs, key=lambda v: (-needs[v], v))
        self._needs = [-needs[v] for v in order]
        self._begins: list[float] = []
        gaps, slacks, lane_s, gap_s = [], [], float("inf"), 0.0
        for value in order:
            latest_s = self._start_s(needs[value])
            gap_s += max(lane_s - latest_s, 0.0) if self._begins else 0.0
            lane_s = min(lane_s, latest_s) - self._lasts(value, moved[value])[1]
            self._begins.append(lane_s)
            gaps.append(gap_s)
            slacks.append(gap_s + max(lane_s - self._start_s(moved[value].gone_by + 1), 0.0))
        self._gaps = gaps
        self._room = list(np.minimum.accumulate(slacks[::-1])[::-1]) if slacks else []

    def place(self, value: int, action: Offload) -> tuple[Offload, float]:
        """One more transfer: its ticks, and by how many seconds it would delay the step.

        Args:
            value: The value that moves.
            action: Its action.
        """
        trace = self._trace
        out_s, back_s = self._lasts(value, action)
        made = trace.ops[trace.values[value].op].tick
        at = bisect_right(self._outs, (made, float("inf")))
        before_s = self._outs[at - 1][1] if at else 0.0
        away_s = max(before_s, self._start_s(made + 1)) + out_s
        gone, late_s = self._first_after(away_s), max(self._late_after(at, away_s), 0.0)
        needed = self._simulator.needed(value)[0]
        if needed is None:
            return Offload(self._to, action.codecs, made, gone), late_s
        place = bisect_left(self._needs, -needed)
        next_s = self._begins[place - 1] if place else float("inf")
        begin_s = min(next_s, self._start_s(needed)) - back_s
        first = self._bells[0] if self._bells else needed
        heard = heard_before(trace, self._tick_at(begin_s), first)
        back = min(max(heard, gone + 1), needed)
        own_s = max(self._start_s(back) - begin_s, 0.0)
        others_s = self._shift(place, begin_s)
        return Offload(self._to, action.codecs, made, gone, back), late_s + max(own_s, others_s)

    def _late_after(self, at: int, away_s: float) -> float:
        """By how much later all is away after the forward if one more goes before the transfer at a place."""
        end_s, previous_s = away_s, self._outs[at - 1][1] if at else 0.0
        for out_at, free_s in self._outs[at:]:
            lasts_s = free_s - max(previous_s, self._start_s(out_at + 1))
            end_s, previous_s = max(end_s, self._start_s(out_at + 1)) + lasts_s, free_s
            if end_s <= free_s:
                return 0.0
        return max(end_s - self._start_s(self._ticks[-1] + 1), 0.0) - self._late_s

    def _shift(self, place: int, begin_s: float) -> float:
        """By how much the transfers that are needed earlier would be late if the lane is taken from a time on."""
        if place >= len(self._begins):
            return 0.0
        latest_s = self._start_s(-self._needs[place])
        pushed_s = max(min(self._begins[place - 1] if place else float("inf"), latest_s) - begin_s, 0.0)
        base = self._gaps[place]
        return max(pushed_s - (self._room[place] - base), 0.0)

    def _lasts(self, value: int, action: Offload) -> tuple[float, float]:
        key = (value, action.codecs)
        if key not in self._seconds:
            out_s, back_s = self._link.seconds(away_bytes(self._trace, value, action.codecs))
            self._seconds[key] = SLACK * out_s, SLACK * back_s
        return self._seconds[key]

    def _start_s(self, tick: int) -> float:
        return float(self._starts_s[tick])

    def _tick_at(self, when_s: float) -> int:
        """The last tick that begins by a time."""
        return max(int(np.searchsorted(self._starts_s, when_s, side="right")) - 1, 0)

    def _first_after(self, when_s: float) -> int:
        """The first forward op that ends at or after a time; the last op where none does."""
        tick = int(np.searchsorted(self._starts_s, when_s, side="left")) - 1
        return self._ticks[min(bisect_left(self._ticks, tick), len(self._ticks) - 1)]
