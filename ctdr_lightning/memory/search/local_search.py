"""Local search over plans at one budget: down to a peak by the cheapest drops, up again by the most rewarding returns.

Going down, the search makes the move that costs the fewest seconds for the bytes that it takes out of the ticks above
the wanted peak, and judges everything near it again. Going up, it makes the move that saves the most seconds for the
bytes that it adds to the crowded ticks, as long as the peak stays. ``polish`` does one after the other; it repairs a
plan that does not fit and fills one that leaves bytes unused. ``improve`` changes a few neighbouring values at random
and polishes again, over and over. Every plan that is passed enters the frontier.

Work is counted in values looked at and ops run again, not in seconds, so that a trace gives the same plan everywhere.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ctdr_lightning.memory.search.frontier import Frontier, Others, Point
from ctdr_lightning.memory.search.moves import Moves
from ctdr_lightning.memory.simulator.actions import Actions
from ctdr_lightning.memory.simulator.journal import Outcome
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.trace import Trace

# By how much of the asked bytes a random change is followed down further than asked, before it goes up again. Depths of
# 0 alone stall on nets of equal blocks: there a move fits only after a larger one nearby was taken back.
DEPTHS = (0.0, 0.02, 0.05, 0.1, 0.15)
# Going up, bytes at ticks above this share of the limit count as scarce. 0.85 was as good as 0.9 and better than 0.7
# and 1.0: the ticks right under the limit are those that fill up next.
CROWDED = 0.85
# Going down, how many of the cheapest moves are simulated again before one is made. Estimates age as moves are made
# around them; with 48 the best of them is nearly always among them, 12 cost a tenth of the plans' gap.
MOVES_EXAMINED = 48
# How many moves that help at the peak but hurt elsewhere are made in a row where no single move helps. Not tuned.
PLUNGE_MOVES = 6
# Share of the allowance for the looks of one way up. In the large LSTM at half its peak, where each look plays long
# replays, one way up took 70 % and found nothing after its first tenth.
ASCENT_SHARE = 0.1
# Below its least peak the search asks for 3 % less at a time: smaller steps take longer, larger ones are missed.
LOWER_PEAK_BY = 0.97
# The search gives up after so many random changes in a row without a lower peak. Not tuned.
FRUITLESS_KICKS = 40
# And after so many in a row, and one per item, without a faster plan at the asked peak. RN18 at half its peak found
# nothing in 900 more.
FRUITLESS_TRIES = 40
_NOTHING_S = 1e-12


class LocalSearch:
    """A search for the best plans of one trace.

    Args:
        step: The step to plan.
        seed: Seed of the random changes.
        allowance: Work that may be done; see ``work``.
        limit_s: Safety stop, in seconds of this thread. When it fires, the result depends on the machine's speed.
        others: Further actions of some values, in addition to keeping and recomputing: a codec, a link.

    Attributes:
        frontier: The best plans so far.

    Example:
        ``search = LocalSearch(trace); search.polish({}, limit); search.frontier.at(limit)``
    """

    def __init__(
        self,
        step: Trace | Prepared,
        seed: int = 0,
        allowance: float = 300_000,
        limit_s: float = math.inf,
        others: Others | None = None,
    ) -> None:
        self._simulator = Simulator(step)
        self._moves = Moves(self._simulator, others)
        self._resident_bytes = self._simulator.trace.resident_bytes
        self._random = random.Random(seed)
        self._stop_s = time.thread_time() + limit_s
        self._allowance = allowance
        self._stop_work = allowance
        self.frontier = Frontier(self._moves.items, self._moves.default, others)
        self._note()

    @property
    def work(self) -> int:
        """Amount of simulation so far; a measure of time that is the same on every machine."""
        return self._simulator.work

    def allow(self, share: float) -> None:
        """Let the steps to come use a share of the allowance, counted from the search's beginning."""
        self._stop_work = self._allowance * share

    @contextmanager
    def at_most(self, share: float) -> Iterator[None]:
        """Limit a block to a share of the allowance, within the present limit."""
        before = self._stop_work
        self._stop_work = min(before, self.work + self._allowance * share)
        yield
        self._stop_work = before

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Leave a block out of the safety stop: one that ends by itself."""
        start_s = time.thread_time()
        yield
        self._stop_s += time.thread_time() - start_s

    def done(self) -> bool:
        """Whether the allowed work is done."""
        return self.work >= self._stop_work or time.thread_time() >= self._stop_s

    def polish(self, actions: Actions, limit_bytes: int) -> bool:
        """Bring a plan under a limit, then save time under it. Returns whether it fits.

        Args:
            actions: The plan to start from; it is entered into the frontier unchanged, too.
            limit_bytes: Largest peak, weights included.
        """
        self._moves.load(self._moves.state_of(actions))
        self._note()
        return self._settle(limit_bytes, limit_bytes)

    def reach(self, actions: Actions, limit_bytes: int) -> bool:
        """Bring a plan under a limit, whatever time that takes. Returns whether it fits."""
        self._moves.load(self._moves.state_of(actions))
        self._note()
        return self._descend(limit_bytes)

    def improve(self, limit_bytes: int, enough: Callable[[], bool]) -> None:
        """Change the best plan under a limit at random and polish it, until it is good enough or the work is done."""
        in_vain, before = 0, float("inf")
        while not self.done() and not enough() and (best := self.frontier.at(limit_bytes)) is not None:
            in_vain = in_vain + 1 if best.seconds >= before else 0
            if in_vain > FRUITLESS_TRIES + len(self._moves.items):
                return
            before = best.seconds
            self._moves.load(best.state)
            self._kick()
            self._settle(self._scaled(limit_bytes, 1 - self._random.choice(DEPTHS)), limit_bytes)

    def deepen(self, enough: Callable[[Point], bool]) -> None:
        """Go on below the smallest peak so far until a plan is small enough, or the allowed work is done."""
        in_vain = 0
        self._moves.load(self.frontier.least.state)
        while in_vain < FRUITLESS_KICKS and not enough(self.frontier.least) and not self.done():
            least = self.frontier.least.peak_bytes
            lower = self._scaled(least, LOWER_PEAK_BY)
            if lower < least and self._descend(lower):
                continue
            in_vain += 1
            self._moves.load(self.frontier.least.state)
            self._kick()
            self._note()  # it may be below ``lower`` at once: without the note that is found again and again

    def _settle(self, depth_bytes: int, limit_bytes: int) -> bool:
        self._descend(depth_bytes)
        if self._simulator.peak_bytes > limit_bytes:
            return False
        self._ascend(limit_bytes)
        return True

    def _note(self) -> None:
        simulator, state = self._simulator, self._moves.state
        self.frontier.add(simulator.peak_bytes, simulator.seconds, lambda: bytes(state))

    def _scaled(self, peak_bytes: int, factor: float) -> int:
        """A peak whose share above the weights is scaled."""
        return self._resident_bytes + int((peak_bytes - self._resident_bytes) * factor)

    def _kick(self) -> None:
        """Change up to three neighbouring items at random."""
        moves, choose = self._moves, self._random
        if not moves.items:
            return
        state, centre, width = bytearray(moves.state), choose.randrange(len(moves.items)), choose.choice((2, 3, 5, 8))
        for _ in range(choose.choice((1, 2, 3))):
            item = min(max(centre + choose.randint(-width, width), 0), len(state) - 1)
            choice = choose.randrange(moves.n_choices)
            if moves.allows(item, choice):
                state[item] = choice
        moves.load(bytes(state))

    def _make(self, move: int) -> list[int]:
        changed = self._moves.make(move)
        self._note()
        return changed

    def _descend(self, limit: int) -> bool:
        """Drop until the peak is within ``limit``. Returns whether that was reached."""
        while self._simulator.peak_bytes > limit and not self.done():
            move = self._cheapest(limit)
            if move is not None:
                self._make(move)
            elif not self._plunge(limit):
                return False
        return self._simulator.peak_bytes <= limit

    def _plunge(self, limit: int) -> bool:
        """If no single move helps, make a few that help at the peak and hurt elsewhere. Returns whether the peak fell.

        Each item is changed once, so that a move is not taken back for the next.
        """
        before, peak = bytes(self._moves.state), self._simulator.peak_bytes
        tabu = np.zeros(len(self._moves.seconds), dtype=bool)
        for _ in range(PLUNGE_MOVES):
            move = self._least_harmful(limit, tabu)
            if move is None:
                break
            self._make(move)
            tabu[self._moves.of([move // self._moves.n_choices])] = True
            if self._simulator.peak_bytes < peak:
                return True
        self._moves.load(before)
        return False

    def _least_harmful(self, limit: int, tabu: np.ndarray) -> int | None:
        moves, live = self._moves, self._simulator.bytes_at()
        gain = np.where(moves.usable & ~tabu, -moves.weigh(live > limit), 0)
        found = [int(m) for m in np.argsort(-gain, kind="stable")[:MOVES_EXAMINED] if gain[m] > 0]
        return max(found, key=lambda m: _excess_taken(moves.look(m), live, limit), default=None)

    def _cheapest(self, limit: int) -> int | None:
        """The move with the fewest seconds per byte that it takes out of the ticks above ``limit``."""
        moves, live = self._moves, self._simulator.bytes_at()
        gain = -moves.weigh(live > limit)
        useful = moves.usable & (gain > 0)
        prices = np.where(useful, _price(moves.seconds, np.maximum(gain, 1)), np.inf)
        best, best_price = None, np.inf
        for _ in range(min(MOVES_EXAMINED, len(prices))):
            move = int(prices.argmin())
            if prices[move] == np.inf or best_price <= 1.1 * prices[move]:
                break
            prices[move] = np.inf
            trial = moves.look(move)
            true_gain = _excess_taken(trial, live, limit)
            if true_gain > 0 and (price := float(_price(trial.seconds, true_gain))) < best_price:
                best, best_price = move, price
        return best

    def _ascend(self, limit: int) -> None:
        """Save time as long as the peak stays within ``limit``."""
        moves = self._moves
        blocked = np.zeros(len(moves.seconds), dtype=bool)
        most_work = self.work + round(ASCENT_SHARE * self._allowance)
        while len(blocked) and not self.done():
            live = self._simulator.bytes_at()
            load = moves.weigh(live > self._scaled(limit, CROWDED))
            reward = np.where(moves.usable & ~blocked, -moves.seconds / np.maximum(load, 1), 0.0)
            move = self._most_rewarding(reward, blocked, live, limit, most_work)
            if move is None:
                return
            blocked[moves.of(self._make(move))] = False

    def _most_rewarding(
        self, reward: np.ndarray, blocked: np.ndarray, live: np.ndarray, limit: int, most_work: int
    ) -> int | None:
        while True:
            move = int(reward.argmax())
            if reward[move] <= 0 or self.work >= most_work:
                return None
            reward[move] = 0.0
            trial = self._moves.look(move)
            if trial.seconds < -_NOTHING_S:
                if _fits(trial, live, limit):
                    return move
                blocked[move] = True


def _price(seconds: np.ndarray | float, gain: np.ndarray | int) -> np.ndarray | float:
    """Seconds per byte saved; moves that cost nothing come first, the largest gain before the smaller."""
    return np.where(np.asarray(seconds) > _NOTHING_S, seconds / gain, -1.0 * gain)


def _excess_taken(trial: Outcome, live: np.ndarray, limit: int) -> int:
    """Bytes that a move takes out of the ticks above ``limit``, less those that it adds above it."""
    taken = 0
    for first, end, level in trial.segments:
        excess = live[first:end] - limit
        taken += int(np.maximum(excess, 0).sum() - np.maximum(excess + level, 0).sum())
    return taken


def _fits(trial: Outcome, live: np.ndarray, limit: int) -> bool:
    return all(level <= 0 or int(live[first:end].max()) + level <= limit for first, end, level in trial.segments)
