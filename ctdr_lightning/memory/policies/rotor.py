"""Rotor: the fastest persistent schedule of a chain under a budget, by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory", Inria research report RR-9302, 2019.

Reproduced: the recursion over a chain whose stages run forward in one of three ways (F-none keeps nothing, F-ck keeps
    the stage's input, F-all keeps all that its backward needs), on 500 slots of memory; optimal among the schedules
    that free kept values only by using them. ``solve`` and ``Table.schedule`` are exact on plain chains.
Projected: the tape replays when autograd asks, so a schedule becomes actions. Values kept by the first pass are kept;
    values that F-all makes in the second pass are recomputed once and cached; values that more passes go through before
    their F-all are recomputed at each use. The first two are exact, except that the tape skips ops whose results nobody
    asks for; the third costs more on the tape, which replays for each value rather than for each stage. A stage's own
    peaks (gradients, workspaces) are read off the trace. The simulator has the last word on every schedule.
Left out: offload (that is POFO).

Complexity O(n^3 * slots) for n stages, in numpy: half a second for 100 stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctdr_lightning.memory.bounds.staged_program import lives_of
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.chain import Chain, find_chain
from ctdr_lightning.memory.simulator.actions import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline

# How many schedules are simulated where the least peak is looked for, for the same reason as in ``optimal``.
N_LIGHTEST = 16
NONE, CHECKPOINT, ALL, BACKWARD = "none", "checkpoint", "all", "backward"
_ALL_CHOICE = 0


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One stage of a plain chain, in the paper's terms.

    Attributes:
        forward_s: Time of its forward.
        backward_s: Time of its backward.
        output_bytes: Its output, which is the next stage's input; its gradient is as large.
        saved_bytes: Bytes that F-all keeps, the output included.
        forward_temp_bytes: Temporary bytes of its forward.
        backward_temp_bytes: Temporary bytes of its backward.
    """

    forward_s: float
    backward_s: float
    output_bytes: int
    saved_bytes: int
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0


@dataclass(frozen=True)
class Table:
    """Times of the best schedules of every part of a chain within every number of slots.

    Attributes:
        seconds: Shape ``(stages, stages, slots + 1)``: from a first to a last stage; infinite where nothing fits.
        choices: 0 to start with F-all, else how many stages to run before the next checkpoint.
        input_slots: Slots of each stage's input.
        saved_slots: Slots that F-all keeps of each stage.
    """

    seconds: np.ndarray
    choices: np.ndarray
    input_slots: np.ndarray
    saved_slots: np.ndarray

    def schedule(self, slots: int, first: int = 0, last: int = -1) -> list[tuple[str, int]]:
        """The best schedule of a part of the chain: actions, each with its stage.

        Args:
            slots: Memory in addition to the part's input; ``seconds[first, last, slots]`` must be finite.
            first: Its first stage.
            last: Its last stage; -1 is the chain's.
        """
        steps: list[tuple[str, int]] = []
        todo: list[tuple[Any, ...]] = [(first, last % self.seconds.shape[0], slots)]
        while todo:
            item = todo.pop()
            if isinstance(item[0], str):
                steps.append((item[0], item[1]))
                continue
            first, last, free = item
            choice = int(self.choices[first, last, free])
            if choice == _ALL_CHOICE:
                rest = [(first + 1, last, free - int(self.saved_slots[first]))] if first < last else []
                todo += [(BACKWARD, first), *rest, (ALL, first)]
            else:
                cut = first + choice
                passed = [(NONE, stage) for stage in range(cut - 1, first, -1)]
                todo += [(first, cut - 1, free), (cut, last, free - int(self.input_slots[cut])), *passed]
                todo.append((CHECKPOINT, first))
        return steps


def solve(links: Sequence[ChainLink], input_bytes: int, slot_bytes: float, n_slots: int = 500) -> Table:
    """Fill the table of a chain.

    Args:
        links: The chain.
        input_bytes: Size of the first stage's input, which is held throughout and does not count in the slots.
        slot_bytes: Bytes of one slot; sizes are rounded up to whole slots.
        n_slots: Slots of the largest budget.
    """
    n = len(links)
    inputs = _slots([input_bytes, *(link.output_bytes for link in links)], slot_bytes)
    saved = _slots([link.saved_bytes for link in links], slot_bytes)
    least = _least_slots(links, inputs * slot_bytes, slot_bytes)
    before = np.concatenate([[0.0], np.cumsum([link.forward_s for link in links])])
    seconds = np.full((n, n, n_slots + 1), np.inf)
    after_cut = np.full((n, n, n_slots + 1), np.inf)  # [last, first, m]: with the first stage's input held
    choices = np.zeros((n, n, n_slots + 1), dtype=np.int16)
    for length in range(n):
        for first in range(n - length):
            last = first + length
            found, choice = seconds[first, last], choices[first, last]
            if not length:
                found[least[first, last] :] = links[first].forward_s + links[first].backward_s
            else:
                _shift(seconds[first + 1, last], saved[first], out=found)
                found += seconds[first, first]
                cuts = after_cut[last, first + 1 : last + 1] + seconds[first, first:last]
                best = cuts.argmin(axis=0)
                by_cut = np.take_along_axis(cuts, best[None], axis=0)[0] - before[first]
                np.copyto(choice, best + 1, where=by_cut < found, casting="unsafe")
                np.minimum(found, by_cut, out=found)
                found[: least[first, last]] = np.inf
            _shift(found + before[first], inputs[first], out=after_cut[last, first])
    return Table(seconds, choices, inputs[:-1], saved)


def _slots(n_bytes: Sequence[float] | np.ndarray, slot_bytes: float) -> np.ndarray:
    return np.ceil(np.asarray(n_bytes, dtype=float) / slot_bytes - 1e-9).astype(int)


def _least_slots(links: Sequence[ChainLink], held: np.ndarray, slot_bytes: float) -> np.ndarray:
    """The least slots of each part of the chain: at its first pass, or at the backward of its only stage."""
    n = len(links)
    passes = [held[j] * (j > 0) + held[j + 1] + links[j].forward_temp_bytes for j in range(n)]
    least = np.zeros((n, n))
    for first, link in enumerate(links):
        temp = max(link.forward_temp_bytes, link.backward_temp_bytes)
        least[first, first] = held[first + 1] + link.saved_bytes + temp
        inside = held[first + 1] + link.forward_temp_bytes
        for last in range(first + 1, n):
            least[first, last] = held[last + 1] + inside
            inside = max(inside, passes[last])
    return np.clip(_slots(least.ravel(), slot_bytes).reshape(n, n), 0, None)


def _shift(row: np.ndarray, slots: int, *, out: np.ndarray) -> None:
    """The times with so many slots fewer."""
    if slots < len(row):
        out[slots:] = row[: len(row) - slots]


@dataclass(frozen=True)
class RotorOptions:
    """Options of ``rotor``.

    Attributes:
        n_slots: Into how many slots memory is divided.
        most_stages: Of longer chains neighbours are joined.
    """

    # The paper's own number of slots: rounding up costs at most a stage's share of a five-hundredth.
    n_slots: int = 500
    # The recursion is cubic: 128 stages take half a second, 256 would take four.
    most_stages: int = 128


@POLICIES.register("rotor", options=RotorOptions())
def rotor(step: Prepared, budget: Budget, options: RotorOptions) -> Timeline:
    """Find the fastest schedule of the net's chain of stages under the budget, and project it to actions of the tape.

    Schedules are simulated from the fastest on until one fits, those passed over that by their slots are still too
    heavy; where none fits, and without a budget, the lightest.
    """
    chain = find_chain(step.trace).coarser(options.most_stages)
    room = max(step.plain_peak_bytes - step.trace.resident_bytes, 1)
    table = solve(links_of(step, chain), 0, room / options.n_slots, options.n_slots)
    schedules = [(slots, table.schedule(slots)) for slots in distinct_slots(table.seconds[0, -1])]
    found: list[Timeline] = []
    light_enough = float(options.n_slots)
    for slots, steps in schedules if budget.peak_bytes is not None else ():
        if slots <= light_enough:
            tried = [judge(step, actions) for actions in projections(chain, steps)]
            excess = min(timeline.peak_bytes for timeline in tried) - (budget.peak_bytes or 0)
            if excess <= 0:
                found = tried
                break
            light_enough = min(light_enough, slots - excess / room * options.n_slots / 2)
    simulated = [] if found else schedules if budget.seconds is not None else schedules[-N_LIGHTEST:]
    # The lightest are the same for every budget: an error names a peak that is found again.
    lightest = [actions for _, steps in simulated for actions in projections(chain, steps)]
    return choose(step, [{}, *found, *lightest], budget, "rotor", chain.note)


def links_of(step: Prepared, chain: Chain) -> list[ChainLink]:
    """The chain in the paper's terms.

    A stage's backward bytes are read off the plain step, less the bytes that the stages before it hold there. The bytes
    of its forward in a pass that keeps nothing are those that no plan can free meanwhile.
    """
    trace, plain, held = step.trace, step.plain_bytes_at, lives_of(step).bytes_at
    links: list[ChainLink] = []
    input_bytes, floor = 0, trace.resident_bytes
    for stage in chain.stages:
        forward = max((int(held[t]) for t in stage.forward_ticks), default=0) - trace.resident_bytes
        backward = max((int(plain[t]) for t in stage.backward_ticks), default=0) - floor
        links.append(
            ChainLink(
                stage.forward_seconds,
                stage.backward_seconds,
                stage.output_bytes,
                stage.saved_bytes,
                forward - input_bytes - stage.output_bytes,
                backward - stage.output_bytes - stage.saved_bytes,
            )
        )
        input_bytes = stage.output_bytes
        floor += stage.saved_bytes
    return links


def distinct_slots(times: np.ndarray) -> Iterator[int]:
    """Numbers of slots from the fastest schedule to the slowest, for each time the fewest that it needs."""
    for slots in range(len(times) - 1, -1, -1):
        if np.isfinite(times[slots]) and (not slots or times[slots - 1] != times[slots]):
            yield slots


def projections(chain: Chain, steps: Sequence[tuple[str, int]]) -> list[dict[int, Action]]:
    """A schedule's actions; where it passes a stage thrice, also those that cache in the second pass already."""
    exact = actions_of(chain, steps)
    if RECOMPUTE_EACH not in exact.values():
        return [exact]
    return [exact, {v: RECOMPUTE if a == RECOMPUTE_EACH else a for v, a in exact.items()}]


def actions_of(chain: Chain, steps: Sequence[tuple[str, int]]) -> dict[int, Action]:
    """The actions with which the tape comes as close to a schedule as possible."""
    passes = [0] * len(chain.stages)
    kept_in: dict[int, int] = {}
    all_in: dict[int, int] = {}
    for kind, stage in steps:
        if kind == BACKWARD:
            continue
        passes[stage] += 1
        if kind != NONE and stage:
            kept_in.setdefault(stage - 1, passes[stage - 1])
        if kind == ALL:
            all_in[stage] = passes[stage]
    actions: dict[int, Action] = dict.fromkeys(chain.held, KEEP)
    for index, part in enumerate(chain.stages):
        made = all_in[index]
        if made > 1:
            actions.update((v, RECOMPUTE if made == 2 else RECOMPUTE_EACH) for v in part.inner if v not in chain.held)
        if part.output >= 0 and kept_in[index] == 1 and not made == all_in[index + 1] == 1:
            actions[part.output] = KEEP
        elif part.output in chain.cached and kept_in[index] > 1:
            actions[part.output] = RECOMPUTE if kept_in[index] == 2 else RECOMPUTE_EACH
    return actions
