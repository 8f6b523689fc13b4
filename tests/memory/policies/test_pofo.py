"""The dynamic program against every schedule of a plain chain, played in the order of time; and the policy."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctdr_lightning.memory import POLICIES, Budget, simulate
from ctdr_lightning.memory.policies.pofo import Program
from ctdr_lightning.memory.policies.rotor import ALL, BACKWARD, ChainLink, solve
from ctdr_lightning.memory.simulator.actions import Offload, Recompute, dropped_values
from ctdr_lightning.memory.traces.machine import Link
from tests.memory.graphs import chain, graph_trace

MEMORY = 12


class Played:
    """One schedule of segments, in the order of time, under the paper's rules.

    In the forward the lane sends while stages run, and the step waits where a segment's first pass finds no room. In
    the backward the lane fetches as far ahead as later segments leave room, and the step waits for what is not there.
    """

    def __init__(self, links, table, rates, memory, parts):
        self.links, self.table, self.parts = links, table, parts
        self.out_rate, self.in_rate = rates
        self.inputs = [0, *(link.output_bytes for link in links)]
        kept = list(itertools.accumulate((self.item(p) * (not p[3]) for p in parts), initial=0))
        self.room = [memory - held - self.inputs[p[0]] for held, p in zip(kept, parts, strict=False)]

    def item(self, part):
        first, _, whole, _, _ = part
        link = self.links[first]
        return self.inputs[first] + (link.saved_bytes - link.output_bytes if whole else 0)

    def forward(self):
        """Seconds of the first passes up to the last segment, which rotor runs."""
        seconds = waiting = 0.0
        for part, room in zip(self.parts, self.room, strict=True):
            first, last, whole, away, slots = part
            takes = slots if last == len(self.links) - 1 else self.first_pass(first, last, whole)
            most = room - takes
            if most < 0:
                return np.inf
            seconds += max(waiting - most, 0) / self.out_rate
            waiting = min(waiting, most)
            if last == len(self.links) - 1:
                return seconds
            run = sum(link.forward_s for link in self.links[first : last + 1])
            seconds += run
            sent, item = run * self.out_rate, self.item(part) * away
            waiting = max(waiting - sent, 0) + item if whole else max(waiting + item - sent, 0)
        raise AssertionError

    def first_pass(self, first, last, whole):
        links = self.links
        passes = [self.inputs[j] + self.inputs[j + 1] + links[j].forward_temp_bytes for j in range(first + 1, last + 1)]
        own = links[first].saved_bytes if whole else links[first].output_bytes
        return max([own + links[first].forward_temp_bytes, *passes])

    def backward(self):
        """Seconds of everything else."""
        ahead_at_most = self.most_ahead()
        seconds, ahead = 0.0, ahead_at_most[-1]
        for k in reversed(range(len(self.parts))):
            first, last, whole, away, slots = self.parts[k]
            again_s = self.table.seconds[first, last, slots]
            if last < len(self.links) - 1:
                item = self.item(self.parts[k]) * away
                seconds += max(item - ahead, 0) / self.in_rate
                ahead = max(ahead - item, 0)
                again_s -= self.links[first].forward_s * whole
                ahead = min(ahead_at_most[k], ahead + again_s * self.in_rate)
            seconds += again_s
        return seconds

    def most_ahead(self):
        """What may be back before each segment's backward is done, so that it and all before it have room."""
        found = []
        for k, part in enumerate(self.parts):
            free = self.room[k] - part[4]
            before = found[-1] + self.item(self.parts[k - 1]) * self.parts[k - 1][3] if k else 0
            found.append(min(free, before))
        return found


def divisions(n, first=0):
    """Every way to divide the stages, as segments without their memory."""
    yield [(first, n - 1, False, False)]
    for last in range(first, n - 1):
        for whole, away in itertools.product((False, True) if last == first else (False,), (False, True)):
            for rest in divisions(n, last + 1):
                yield [(first, last, whole, away), *rest]


def fastest(links, rates, memory):
    """Seconds of the fastest schedule, by looking at all of them."""
    table = solve(links, 0, 1, memory)
    best = np.inf
    for parts in divisions(len(links)):
        for slots in itertools.product(*(useful_slots(table, part) for part in parts)):
            chosen = [(*part, m) for part, m in zip(parts, slots, strict=True)]
            played = Played(links, table, rates, memory, chosen)
            if all(room >= m for room, m in zip(played.room, slots, strict=True)):
                best = min(best, played.forward() + played.backward())
    return best


def useful_slots(table, part):
    times = table.seconds[part[0], part[1]]
    finite = np.flatnonzero(np.isfinite(times))
    if part[2]:
        return finite[:1]
    return [m for m in finite if m == finite[0] or times[m] != times[m - 1]]


links_ = st.builds(
    lambda forward, backward, output, inside, forward_temp, backward_temp: ChainLink(
        forward, backward, output, output + inside, forward_temp, backward_temp
    ),
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(0, 3), st.integers(0, 1), st.integers(0, 1),
)  # fmt: skip
rates_ = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2]))


@settings(max_examples=60)
@given(st.lists(links_, min_size=1, max_size=4), rates_)
def test_no_schedule_is_faster(links, rates):
    program = Program(links, *rates, slot_bytes=1, n_slots=MEMORY)
    for memory in (MEMORY, MEMORY - 3, MEMORY - 5, MEMORY - 7):
        assert program.seconds[memory] == pytest.approx(fastest(links, rates, memory))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(links_, min_size=1, max_size=8), rates_)
def test_a_link_never_makes_it_slower_than_rotor_and_every_stage_runs_backward_once(links, rates):
    program, rotor = Program(links, *rates, slot_bytes=1, n_slots=24), solve(links, 0, 1, 24)
    for memory in np.flatnonzero(np.isfinite(program.seconds)):
        assert program.seconds[memory] <= rotor.seconds[0, -1, memory] + 1e-9
        steps = program.schedule(memory)
        assert [stage for kind, stage in steps if kind == BACKWARD] == list(reversed(range(len(links))))
        assert {stage for kind, stage in steps if kind == ALL} == set(range(len(links)))


def test_times_fall_as_slots_and_rates_rise():
    links = [ChainLink(1 + i % 3, 2, 1 + i % 3, 2 + i % 5) for i in range(10)]
    rows = [Program(links, rate, rate, 1, 24).seconds for rate in (0.5, 1, 4)]
    for row in rows:
        assert np.all(np.diff(row[np.isfinite(row)]) <= 1e-9)
    for slow, fast in itertools.pairwise(rows):
        assert np.all(fast <= slow + 1e-9)


def on_a_link(bytes_per_s):
    return graph_trace(chain([8] * 16)).with_machine([Link("host", bytes_per_s, bytes_per_s)])


def at_half(trace):
    return Budget(peak_bytes=simulate(trace).peak_bytes // 2)


def test_on_a_fast_link_nothing_is_recomputed_and_on_a_slow_one_nothing_moves():
    fast, slow = on_a_link(1e9), on_a_link(1e-3)
    moving = POLICIES["pofo"](fast, at_half(fast))
    assert moving.seconds == pytest.approx(fast.seconds)
    assert not dropped_values(fast, moving.actions)
    still = POLICIES["pofo"](slow, at_half(slow))
    assert not any(isinstance(action, Offload) for action in still.actions.values())
    assert any(isinstance(action, Recompute) for action in still.actions.values())


def test_between_the_two_it_does_both_and_takes_a_third_of_rotors_overhead_away():
    trace = on_a_link(2.5)
    made = POLICIES["pofo"](trace, at_half(trace))
    assert {Offload, Recompute} <= {type(action) for action in made.actions.values()}
    assert made.peak_bytes <= at_half(trace).peak_bytes
    rotor = POLICIES["rotor"](trace, at_half(trace))
    assert made.seconds - trace.seconds <= 2 / 3 * (rotor.seconds - trace.seconds) + 1e-9


def test_without_a_link_it_keeps_everything():
    trace = graph_trace(chain([8] * 16))
    assert not POLICIES["pofo"](trace, Budget()).actions
