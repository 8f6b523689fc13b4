"""Memory saving per second: Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning".

ASPLOS 2020.

Reproduced: the recomputation half. Accesses are measured in one passive step (the trace); candidates are tensors that
    are accessed again after the peak; the one with the most memory saved per second of recomputation (MSPS) is chosen,
    then the times of the others change: a tensor whose source is chosen must also recompute that source, and a chosen
    tensor's source is recomputed once more for each chosen tensor that needs it; until the peak fits. Recomputation is
    collective: what a replay passes and is still awaited is kept.
Modelled: where the peak is, after each choice, is asked of the simulator instead of the next measured step.
Left out: swapping.

Complexity O(n^2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ctdr_lightning.memory.plans.actions import RECOMPUTE, Actions
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.trace import Trace

_LEAST_S = 1e-9


@dataclass
class Candidate:
    """A tensor that may be recomputed.

    Attributes:
        value: Its value id.
        n_bytes: What recomputing it saves.
        sources: The tensors that its recomputation starts from.
        replay_s: Time from them to it.
        extra_s: Time that others lose because it is gone.
    """

    value: int
    n_bytes: int
    sources: set[int]
    replay_s: float
    extra_s: float = 0.0

    @property
    def msps(self) -> float:
        """Memory saving per second."""
        return self.n_bytes / max(self.replay_s + self.extra_s, _LEAST_S)


@POLICIES.register("capuchin")
def capuchin(step: Prepared, budget: Budget) -> Timeline:
    """Recompute the tensors that save the most memory per second until the peak fits.

    Raises:
        InfeasibleBudgetError: When the peak does not fit although nothing is left to recompute there.
    """
    return choose(step, _plans(step, budget), budget, "capuchin")


def _plans(step: Prepared, budget: Budget) -> Iterator[Actions]:
    """The one plan that fits, or where there is no limit the one with the least peak that is passed."""
    trace, simulator, chosen = step.trace, Simulator(step), dict[int, Candidate]()
    candidates = candidates_of(trace)
    least, best = simulator.peak_bytes, dict(simulator.actions)
    while budget.peak_bytes is None or simulator.peak_bytes > budget.peak_bytes:
        peak = int(simulator.bytes_at().argmax())
        there = [c for v, c in candidates.items() if _idle_at(trace, v, peak)]
        if not there:
            break
        pick = max(there, key=lambda c: (c.msps, -c.value))
        take(pick, candidates, chosen)
        simulator.change({pick.value: RECOMPUTE})
        if simulator.peak_bytes < least:
            least, best = simulator.peak_bytes, dict(simulator.actions)
    yield best


def candidates_of(trace: Trace) -> dict[int, Candidate]:
    """Every saved tensor that can be recomputed, as if all others were there."""
    found = {}
    for value in trace.saved:
        if value in trace.droppable:
            sources, seconds = _back_to_saved(trace, value)
            found[value] = Candidate(value, trace.value_bytes(value), sources, seconds)
    return found


def take(pick: Candidate, candidates: dict[int, Candidate], chosen: dict[int, Candidate]) -> None:
    """Choose a tensor, and bring the times of those that are connected with it up to date (Algorithm 2)."""
    del candidates[pick.value]
    chosen[pick.value] = pick
    touched = set(pick.sources)
    for other in (*chosen.values(), *candidates.values()):
        if pick.value in other.sources:
            other.sources = (other.sources - {pick.value}) | pick.sources
            if other.value in candidates:
                other.replay_s += pick.replay_s
                touched.add(other.value)
    for value in touched & candidates.keys():
        candidates[value].extra_s = candidates[value].replay_s * sum(value in c.sources for c in chosen.values())


def _idle_at(trace: Trace, value: int, tick: int) -> bool:
    """Whether a tick lies between the value's last use in the forward and its first in the backward."""
    record = trace.values[value]
    uses = [t for save in record.saves for t in save.unpacked]
    return bool(uses) and trace.storages[record.storage].end < tick < min(uses)


def _back_to_saved(trace: Trace, value: int) -> tuple[set[int], float]:
    """The saved tensors, weights and inputs from which a value is made, and the time of the ops in between."""
    ops, sources, stack = set[int](), set[int](), [value]
    while stack:
        current = stack.pop()
        op = trace.values[current].op
        if current != value and (trace.values[current].saves or current not in trace.droppable):
            sources.add(current)
        elif op not in ops:
            ops.add(op)
            stack.extend(trace.ops[op].inputs)
    return sources, sum(trace.replay_seconds(op) for op in ops)
