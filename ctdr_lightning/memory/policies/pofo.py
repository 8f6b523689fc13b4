"""POFO: rematerialization and offloading of a chain in one dynamic program.

Beaumont, Eyraud-Dubois and Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
NeurIPS 2021.

Reproduced: a chain whose first pass is cut into segments. The tensors from which a segment's backward starts (its
    input, and for a single stage that runs F-all all its saves) stay or go over one link, out behind the forward and
    back behind the backward; a segment that kept its input alone is run again as ``rotor`` runs it, in the memory that
    is free by then. The step waits for the link where memory is full. The fastest such schedule for every memory, by
    dynamic programming over stage, free memory, bytes that wait to go out and bytes that must be back already.
Modelled: bytes leave and come back evenly, so that a tensor half sent takes half of its memory. Recomputed values are
    never sent, as in the paper. The recursion over these states is ours: it was written from the problem, not from the
    authors' code.
Projected: as in ``rotor``. Values that are needed when the backward begins never leave. Transfers start as early
    and come back as late as hides them, with the slack that every policy's transfers have; that the forward waits for
    room is not carried over. So all schedules are simulated, and the simulator has the last word.
Left out: several links, of which the fastest is taken, and their latency. Without a link the policy keeps everything.
Claimed: the link takes a third of the overhead of recomputation away.

Complexity O(n^2 * slots^3) in numpy, with far fewer slots than ``rotor``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import ceil

import numpy as np

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.policies.rotor import (
    ALL,
    BACKWARD,
    CHECKPOINT,
    NONE,
    ChainLink,
    distinct_slots,
    links_of,
    projections,
    solve,
)
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.chain import SMALL_SHARE, Chain, find_chain
from ctdr_lightning.memory.search.layered import largest_link
from ctdr_lightning.memory.simulator.actions import Actions, Keep, Offload, Recompute
from ctdr_lightning.memory.simulator.away import link_to
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import SLACK
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.facts import facts_of

# Rotor's table is finer than the states: it rounds every size up, which at 32 slots would cost a stage's share each.
FINE = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Some stages of the chain in its first pass.

    Attributes:
        first: Its first stage.
        last: Its last stage.
        whole: Whether it is a single stage that runs F-all.
        away: Whether its kept values go over the link.
        slots: Memory that its second pass has, where it has one.
        back: Slots of values sent by earlier segments that must be back when it is done.
    """

    first: int
    last: int
    whole: bool
    away: bool
    slots: int = 0
    back: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """Slots before a segment: free ones, those that wait to go out, those that must be back when it is done."""

    free: np.ndarray
    out: np.ndarray
    back: np.ndarray


class Program:
    """Times of the best schedules from each stage on, whatever is free and whatever is on its way.

    Args:
        links: The chain; its input is empty.
        out_bytes_per_s: Rate at which bytes leave the device.
        in_bytes_per_s: Rate at which they come back.
        slot_bytes: Bytes of one slot.
        n_slots: Slots of the largest memory.

    Attributes:
        table: Rotor's, of the chain's parts.
    """

    def __init__(
        self, links: Sequence[ChainLink], out_bytes_per_s: float, in_bytes_per_s: float, slot_bytes: float, n_slots: int
    ) -> None:
        self.links, self.slot_bytes, self.n_slots = links, slot_bytes, n_slots
        self.table = solve(links, 0, slot_bytes / FINE, n_slots * FINE)
        self._remade_s = self.table.seconds[:, :, ::FINE]
        inputs = [0, *(link.output_bytes for link in links)]
        self._inputs = _whole_slots(inputs, slot_bytes)
        self._inside = _whole_slots([max(link.saved_bytes - link.output_bytes, 0) for link in links], slot_bytes)
        self._pass_bytes = [inputs[j] + inputs[j + 1] + link.forward_temp_bytes for j, link in enumerate(links)]
        self._out_rate, self._in_rate = out_bytes_per_s / slot_bytes, in_bytes_per_s / slot_bytes
        self._forward_s = np.concatenate([[0.0], np.cumsum([link.forward_s for link in links])])
        self._backward_s = np.concatenate([[0.0], np.cumsum([link.backward_s for link in links])])
        steps = np.arange(n_slots + 1)
        every = _State(steps[:, None, None], steps[:, None], steps)
        self._best: list[np.ndarray] = [np.empty(0)] * len(links)
        for first in reversed(range(len(links))):
            self._best[first] = self._waited(reduce(np.minimum, (seconds for seconds, _ in self._ways(first, every))))

    @property
    def seconds(self) -> np.ndarray:
        """Time of the best schedule of the whole chain for every number of slots; infinite where nothing fits."""
        return self._best[0][:, 0, 0]

    def segments(self, slots: int) -> list[Segment]:
        """The best schedule's segments; the last one runs as rotor runs it, from its first pass on.

        Args:
            slots: Memory; ``seconds[slots]`` must be finite.
        """
        found: list[Segment] = []
        first, free, out, back = 0, slots, 0, 0
        while not found or found[-1].last < len(self.links) - 1:
            outs, backs = np.arange(out + 1)[:, None], np.arange(back + 1)
            state = _State(np.array(free), outs, backs)
            waits_s = (out - outs) / self._out_rate + (back - backs) / self._in_rate
            ways = [(seconds + waits_s, segment) for seconds, segment in self._ways(first, state)]
            seconds, segment = min(ways, key=lambda way: way[0].min())
            at = np.unravel_index(seconds.argmin(), seconds.shape)
            out, back = int(at[0]), int(at[1])
            room = free - int(self._inputs[first])
            if segment.last == len(self.links) - 1:
                return [*found, replace(segment, slots=room - max(out, back), back=back)]
            found.append(replace(segment, slots=room - back, back=back))
            after = self._after(segment, _State(*map(np.array, (free, out, back))))[1]
            first, free, out, back = segment.last + 1, int(after.free), int(after.out), int(after.back)
        return found

    def schedule(self, slots: int) -> list[tuple[str, int]]:
        """The best schedule in rotor's notation: actions, each with its stage."""
        *passed, rest = self.segments(slots)
        steps: list[tuple[str, int]] = []
        for part in passed:
            steps.append((ALL if part.whole else CHECKPOINT, part.first))
            steps += [(NONE, stage) for stage in range(part.first + 1, part.last + 1)]
        steps += self.table.schedule(rest.slots * FINE, rest.first)
        for part in reversed(passed):
            again = self.table.schedule(part.slots * FINE, part.first, part.last)
            steps += [(BACKWARD, part.first)] if part.whole else again
        return steps

    def _ways(self, first: int, state: _State) -> Iterator[tuple[np.ndarray, Segment]]:
        """Every segment to go on with, and the seconds from there to the end; first the rest as rotor runs it."""
        last = len(self.links) - 1
        room = state.free - self._inputs[first] - np.maximum(state.out, state.back)
        yield self._remade(first, last, room), Segment(first, last, whole=False, away=False)
        ends = [(first, True), *((end, False) for end in range(first, last))] if first < last else []
        for (end, whole), away in product(ends, (False, True)):
            segment = Segment(first, end, whole, away)
            seconds, after = self._after(segment, state)
            yield seconds + self._at(end + 1, after), segment

    def _after(self, segment: Segment, state: _State) -> tuple[np.ndarray, _State]:
        """Seconds of a segment, infinite if it does not fit, and the slots that are free and on their way behind it."""
        first, behind = segment.first, segment.last + 1
        room = state.free - self._inputs[first]
        seconds = self._remade(first, segment.last, room - state.back)
        backward_s = self.links[first].backward_s if segment.whole else np.where(np.isfinite(seconds), seconds, 0.0)
        sent = _crossed(self._forward_s[first], self._forward_s[behind] - self._forward_s[first], self._out_rate)
        fetched = _crossed(self._backward_s[first], backward_s, self._in_rate)
        item = self._inputs[first] + (self._inside[first] if segment.whole else 0)
        moved = item if segment.away else 0
        early = 0 if segment.whole else moved  # an input can leave while the segment runs, outputs of F-all cannot
        out = np.maximum(state.out + early - sent, 0) + moved - early
        after = _State(state.free - item + moved, out, np.maximum(state.back - fetched, 0) + moved)
        fits = room - state.out >= self._first_pass(segment)
        again_s = 0.0 if segment.whole else self._forward_s[behind] - self._forward_s[first]
        return np.where(fits, seconds + again_s, np.inf), after

    def _remade(self, first: int, last: int, slots: np.ndarray) -> np.ndarray:
        """Rotor's seconds for a part of the chain, forward and backward."""
        found = self._remade_s[first, last][np.clip(slots, 0, self.n_slots)]
        return np.where(slots >= 0, found, np.inf)

    def _at(self, first: int, state: _State) -> np.ndarray:
        """Seconds from a stage on; infinite where more is on its way than there is memory."""
        parts = (state.free, state.out, state.back)
        found = self._best[first][tuple(np.clip(part, 0, self.n_slots) for part in parts)]
        fits = (state.free >= 0) & (state.out <= self.n_slots) & (state.back <= self.n_slots)
        return np.where(fits, found, np.inf)

    def _first_pass(self, segment: Segment) -> int:
        """Slots of a segment's forward, without its input."""
        link = self.links[segment.first]
        first = max(link.saved_bytes, link.output_bytes) if segment.whole else link.output_bytes
        passes = (self._pass_bytes[j] for j in range(segment.first + 1, segment.last + 1))
        return ceil(max(first + link.forward_temp_bytes, *passes, 0) / self.slot_bytes - 1e-9)

    def _waited(self, seconds: np.ndarray) -> np.ndarray:
        """The same where the step may wait until less is on its way."""
        steps = np.arange(self.n_slots + 1)
        for axis, wait_s in ((1, steps[:, None] / self._out_rate), (2, steps / self._in_rate)):
            seconds = np.minimum.accumulate(seconds - wait_s, axis=axis) + wait_s
        return seconds


def _whole_slots(n_bytes: Sequence[int], slot_bytes: float) -> np.ndarray:
    """Sizes in slots, rounded so that their sums are right: rounded up, small ones would add up to too much."""
    return np.diff(np.rint(np.cumsum([0, *n_bytes]) / slot_bytes)).astype(int)


def _crossed(start_s: float, seconds: np.ndarray | float, rate: float) -> np.ndarray:
    """Slots that a link moves meanwhile, rounded so that those of one stage after the other add up."""
    return (np.floor((start_s + seconds) * rate + 1e-9) - np.floor(start_s * rate + 1e-9)).astype(int)


@dataclass(frozen=True)
class PofoOptions:
    """Options of ``pofo``.

    Attributes:
        n_slots: Into how many slots memory is divided.
        most_stages: Of longer chains neighbours are joined.
    """

    # The states are cubic in slots: 32 and 16 stages take a quarter of a second. On R, T, GPT-2 and a small residual
    # net 48 slots, or 24 stages, took two to three times as long and gave plans faster by 0.01 or by nothing.
    n_slots: int = 32
    most_stages: int = 16


@POLICIES.register("pofo", uses=frozenset({Keep, Recompute, Offload}), options=PofoOptions())
def pofo(step: Prepared, budget: Budget, options: PofoOptions) -> Timeline:
    """Find the fastest schedule that recomputes and moves under the budget, and project it to actions of the tape.

    Raises:
        InfeasibleBudgetError: If no schedule fits.
    """
    chain = find_chain(step.trace).coarser(options.most_stages)
    return choose(step, _plans(step, chain, options.n_slots), budget, "pofo", chain.note)


def _plans(step: Prepared, chain: Chain, n_slots: int) -> Iterator[Actions]:
    yield {}
    to = largest_link(step.trace)
    if not to:
        return  # nothing but recomputation is possible, which rotor is for
    link = link_to(step.trace, to)
    rates = link.out_bytes_per_s / SLACK, link.in_bytes_per_s / SLACK
    slot_bytes = max(step.plain_peak_bytes - step.trace.resident_bytes, 1) / n_slots
    program = Program(links_of(step, chain), *rates, slot_bytes, n_slots)
    for slots in distinct_slots(program.seconds):
        moved = dict.fromkeys(_moved(step, chain, program.segments(slots), slot_bytes), Offload(to))
        yield from ({**actions, **moved} for actions in projections(chain, program.schedule(slots)))


def _moved(step: Prepared, chain: Chain, segments: Sequence[Segment], slot_bytes: float) -> Iterator[int]:
    """The values that go over the link.

    Values that must be back when the backward begins, which are the last ones made, never leave.
    """
    trace, staying_bytes = step.trace, segments[-1].back * slot_bytes
    for segment in reversed(segments):
        for value in _sent(step, chain, segment) if segment.away else ():
            n_bytes = trace.value_bytes(value)
            if n_bytes / 2 > staying_bytes:
                yield value
            staying_bytes = max(staying_bytes - n_bytes, 0)


def _sent(step: Prepared, chain: Chain, segment: Segment) -> Iterator[int]:
    """The values from which a segment's backward starts, the last made first; small values stay."""
    trace, facts = step.trace, facts_of(step.trace)
    least = SMALL_SHARE * max(map(trace.value_bytes, trace.saved), default=0)
    before = (chain.stages[segment.first - 1].output,) if segment.first else ()
    for value in (*reversed(chain.stages[segment.first].inner if segment.whole else ()), *before):
        if trace.values[value].saves and facts[value].movable and trace.value_bytes(value) >= least:
            yield value
