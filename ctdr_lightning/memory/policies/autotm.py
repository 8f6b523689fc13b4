"""An integer program decides where each tensor waits.

Hildebrand et al., "AutoTM: Automatic Tensor Movement in Heterogeneous Memory Systems using Integer Linear Programming",
ASPLOS 2020.

Reproduced: an integer program over tensors: kept, moved while the step computes, or moved while it waits; at every
    point of the program the bytes on the device are at most the limit, and the transfers that computation is to hide
    take no longer than it does up to there; the objective is the least time of transfers that it does not hide. If the
    plan really takes more memory than in the program, the limit is lowered and the program solved again.
Modelled: a program point is a tick of the recorded step. A direction's transfers are late by one time, the longest.
Left out: kernels that read their inputs from the slower memory in place, which a GPU's do not.
Claimed: 50 to 80 % of the DRAM replaced by slower memory, 27.7 % slower in the geometric mean.

Complexity: exponential at worst; two binary variables and two rows a tensor, and a row a point that is above the limit.
    The solver stops at a gap of 1 % or after a number of nodes, never by the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ctdr_lightning.memory.bounds.linear_program import LinearProgram
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose, waiting_for_room
from ctdr_lightning.memory.search.layered import LayerInput, largest_link, layer_inputs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.away import link_to
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import SLACK, scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.machine import Link

# Nodes of the search tree: AutoTM's paper lets Gurobi run for minutes; R and GPT-2 were solved at the root.
N_NODES = 200
ROUNDS = 8
# Without a peak in the budget, limits of these shares of the bytes above the resident ones are solved for.
SHARES = (0.75, 0.5, 0.25)
# Every transfer costs something although it is hidden, so that no more is moved than must be.
HIDDEN_COST = 0.01


@POLICIES.register("autotm", uses=frozenset({Keep, Offload}))
def autotm(step: Prepared, budget: Budget) -> Timeline:
    """Move the tensors that the integer program chooses.

    Raises:
        InfeasibleBudgetError: If no program's plan fits.
    """
    return choose(step, waiting_for_room(step, _plans(step, budget), budget), budget, "autotm")


def _plans(step: Prepared, budget: Budget) -> Iterator[Actions]:
    yield {}
    trace = step.trace
    to = largest_link(trace)
    if not to:
        return
    plain = step.plain_peak_bytes
    programs = _Programs(step, link_to(trace, to))
    limits = [trace.resident_bytes + int(share * (plain - trace.resident_bytes)) for share in SHARES]
    for wanted in limits if budget.peak_bytes is None else [budget.peak_bytes]:
        limit, tried = max(wanted, programs.least_bytes), 0
        for attempt in range(ROUNDS):
            moved = programs.solved(limit) if limit != tried else None
            if moved is None:
                break
            actions = scheduled(step, moved)
            yield actions
            over = Simulator(step, actions).peak_bytes - wanted
            if over <= 0:
                break
            # early landings or late departures may need more than their own excess
            limit, tried = max(limit - (over << attempt), programs.least_bytes), limit


class _Programs:
    """Shared data of all programs of a step: each tensor's cost of moving, and the ticks at which it is away.

    Attributes:
        least_bytes: No program has a solution for less.
    """

    def __init__(self, step: Prepared, link: Link) -> None:
        simulator = Simulator(step)
        self._starts_s = simulator.base_starts_s()
        self._link = link
        self._inputs = layer_inputs(step, lambda op: True)
        # In steps: HiGHS takes rows within 1e-6 for met, which is more than a small step's seconds.
        self._step_s = float(self._starts_s[-1]) or 1.0
        self._steps = np.array([link.seconds(e.n_bytes) for e in self._inputs]).reshape(-1, 2) / self._step_s
        hidden = [_window(entry, link, self._starts_s) for entry in self._inputs]
        self._hidden = np.array(hidden, dtype=np.int64).reshape(-1, 2)
        waited = [(entry.read, entry.needed) for entry in self._inputs]
        self._windows = np.array([*hidden, *waited], dtype=np.int64).reshape(-1, 2)
        self._points = list(_points(simulator.bytes_at(), [*hidden, *waited]))
        self.least_bytes = max((live - sum(self._away_bytes(tick)) for tick, live in self._points), default=0)

    def solved(self, limit_bytes: int) -> dict[int, Action] | None:
        """The moves under which every tick stays within a limit; None if there are none."""
        program, both = LinearProgram(), self._steps.sum(axis=1)
        hidden = [program.variable(HIDDEN_COST * cost, whole=True) for cost in both]
        waited = [program.variable(cost, whole=True) for cost in both]
        for pair in zip(hidden, waited, strict=True):
            program.at_most([(column, 1.0) for column in pair], 1.0)
        self._limit_bytes(program, hidden + waited, limit_bytes)
        self._limit_transfers(program, hidden)
        found = program.solve(float("inf"), gap=0.01, n_nodes=N_NODES)
        if found is None:
            return None
        chosen = zip(self._inputs, hidden, waited, strict=True)
        return {
            e.value: Offload(self._link.to) if found.values[h] > 0.5 else Offload(self._link.to, (), e.read, e.read)
            for e, h, w in chosen
            if max(found.values[h], found.values[w]) > 0.5
        }

    def _away_bytes(self, tick: int) -> list[int]:
        """Bytes of the tensors that may be away at a tick."""
        return [entry.n_bytes for entry in self._inputs if entry.read < tick < entry.needed]

    def _limit_bytes(self, program: LinearProgram, columns: list[int], limit_bytes: int) -> None:
        left, back = self._windows.T
        n_bytes = [-float(entry.n_bytes) for entry in self._inputs] * 2
        for tick, live_bytes in self._points:
            if live_bytes > limit_bytes:
                away = np.flatnonzero((left < tick) & (tick < back)).tolist()
                program.at_most([(columns[i], n_bytes[i]) for i in away], float(limit_bytes - live_bytes))

    def _limit_transfers(self, program: LinearProgram, columns: list[int]) -> None:
        """Hidden transfers, less what of them comes late, fit into the time before their windows and after them."""
        left, back = self._hidden.T
        starts = self._starts_s / self._step_s
        for direction, (edges, before, time) in enumerate(
            [(left, np.less_equal, starts[left + 1]), (back, np.greater_equal, 1.0 - starts[back])]
        ):
            steps = self._steps[:, direction]
            late = program.variable(float(steps.sum()))
            for edge, room in sorted(set(zip(edges.tolist(), time.tolist(), strict=True))):
                terms = [(columns[i], float(steps[i])) for i in np.flatnonzero(before(edges, edge)).tolist()]
                program.at_most([*terms, (late, -float(steps.sum()))], room)


def _window(entry: LayerInput, link: Link, starts_s: np.ndarray) -> tuple[int, int]:
    """The ticks between which a tensor's memory is free: after its way out, before its way back begins.

    None lies between where the link is too slow for both.
    """
    out_s, in_s = (SLACK * seconds for seconds in link.seconds(entry.n_bytes))
    left = int(np.searchsorted(starts_s, starts_s[entry.read + 1] + out_s)) - 1
    back = int(np.searchsorted(starts_s, starts_s[entry.needed] - in_s, side="right")) - 1
    return min(max(left, entry.read), entry.needed), min(max(back, 0), entry.needed)


def _points(live: np.ndarray, windows: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """``(tick, bytes)``: of every stretch in which the same tensors may be away the tick that takes most."""
    ticks = {0, len(live)}.union(*((left + 1, back) for left, back in windows))
    for first, end in pairwise(sorted(tick for tick in ticks if 0 <= tick <= len(live))):
        tick = first + int(live[first:end].argmax())
        yield tick, int(live[tick])
