"""Local search over plans: down to a peak by the cheapest drops, up again by the most rewarding returns.

Going down, the move that costs the fewest seconds for the bytes that it takes out of the ticks above the wanted peak is
made, and everything near it is judged again. Going up, the move that saves the most seconds for the bytes that it adds
to the crowded ticks is made, as long as the peak stays. Neither alone is good; going down further than wanted and up
again, over and over, at every peak and from the best plan known there, comes close to the optimum. Every plan that is
passed enters the frontier, so that the search is the same for every budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np

from ctdr_lightning.memory.plans.actions import RECOMPUTE_EACH, Actions
from ctdr_lightning.memory.search.frontier import CHOICES, Frontier, Point
from ctdr_lightning.memory.search.moves import Moves
from ctdr_lightning.memory.simulator.simulator import Simulator, Trial
from ctdr_lightning.memory.traces.trace import Trace

RUNG = 0.97
STRIDE = 0.98
DEPTHS = (0.0, 0.02, 0.05, 0.1, 0.15)
CROWDED = 0.85
PATIENCE = 48
PLUNGE = 6
FIRST_SHARE = 0.4
KICKS = 40
IN_VAIN = 15
CALM_SWEEPS = 2
WORK_AT_LEAST, WORK_PER_ITEM = 350_000, 1_200
_NOTHING_S = 1e-12
_EACH = CHOICES.index(RECOMPUTE_EACH)


class Search:
    """A search for the frontier of one trace.

    Args:
        trace: The step.
        seed: Seed of the kicks.
        patience: How much more than usual may be searched.
        expired: Tells when to stop early; it should not, as the result then depends on the machine.
        frontier: What an earlier search of the same trace has found, to go on from.

    Attributes:
        frontier: The best plans so far.
    """

    def __init__(
        self,
        trace: Trace,
        seed: int = 0,
        patience: float = 1.0,
        expired: Callable[[], bool] = lambda: False,
        frontier: Frontier | None = None,
    ) -> None:
        self._simulator = Simulator(trace)
        self._moves = Moves(self._simulator)
        self._floor = trace.resident_bytes
        self._plain = self._simulator.peak_bytes
        self._random = random.Random(seed)
        self._expired = expired
        self._work = int(max(WORK_AT_LEAST, WORK_PER_ITEM * len(self._moves.items)) * patience)
        self._stop_work = self._work
        self.frontier = frontier or Frontier(self._moves.items, self._moves.default)
        self._n_found = 0
        self._note()

    def run(self, starts: Iterable[Actions] = ()) -> Frontier:
        """Search until the work that the trace's size allows is done.

        Args:
            starts: Plans of other policies to improve on.
        """
        self._allow(FIRST_SHARE)
        lowest = self._sweep_down(self._plain)
        self._allow(1.0)
        for start in starts:
            self._improve(self._moves.state_of(start))
        if len(self._moves.items) ** 3 < 4 * self._work:  # replays of a whole net for each value are slow to simulate
            self._improve(bytes(_EACH for _ in self._moves.items))
        self._sweep_up(lowest)
        sweeps = in_vain = 0
        while not self._done() and in_vain < IN_VAIN:
            n_found = self._n_found
            self._oscillate(kicks=sweeps >= CALM_SWEEPS)
            sweeps += 1
            in_vain = in_vain + 1 if self._n_found == n_found else 0
        return self.frontier

    def deepen(self, enough: Callable[[Point], bool]) -> Frontier:
        """Go on below the smallest peak so far until a plan is small enough, or the allowed work is done."""
        in_vain = 0
        self._moves.load(self.frontier.least.state)
        while in_vain < KICKS and not enough(self.frontier.least) and not self._done():
            if self._descend(self._scaled(self.frontier.least.peak_bytes, RUNG), plunge=True):
                continue
            in_vain += 1
            self._moves.load(self.frontier.least.state)
            self._kick()
        return self.frontier

    def _improve(self, state: bytes) -> None:
        self._moves.load(state)
        self._note()
        self._ascend(self._simulator.peak_bytes)

    def _allow(self, share: float) -> None:
        self._stop_work = int(self._work * share)

    def _done(self) -> bool:
        return self._simulator.work >= self._stop_work or self._expired()

    def _note(self) -> None:
        simulator, state = self._simulator, self._moves.state
        self._n_found += self.frontier.add(simulator.peak_bytes, simulator.seconds, lambda: bytes(state))

    def _scaled(self, peak_bytes: int, factor: float) -> int:
        """A peak whose share above the weights is scaled."""
        return self._floor + int((peak_bytes - self._floor) * factor)

    def _sweep_down(self, limit: int) -> int:
        while self._descend(limit, plunge=True):
            limit = self._scaled(limit, RUNG)
        return limit

    def _sweep_up(self, limit: int) -> None:
        best = self.frontier.at(limit) or self.frontier.least
        self._moves.load(best.state)
        while limit < self._plain and not self._done():
            limit = max(self._scaled(limit, 1 / RUNG), limit + 1)
            self._ascend(limit)

    def _oscillate(self, *, kicks: bool) -> None:
        limit = self._scaled(self._plain, self._random.uniform(0.93, 0.99))
        while not self._done() and (best := self.frontier.at(limit)) is not None:
            self._moves.load(best.state)
            if kicks:
                self._kick()
            self._descend(self._scaled(limit, 1 - self._random.choice(DEPTHS)))
            self._ascend(limit)
            limit = min(self._scaled(limit, STRIDE), limit - 1)

    def _kick(self) -> None:
        """Change up to three neighbouring items at random."""
        moves, choose = self._moves, self._random
        state, centre, width = bytearray(moves.state), choose.randrange(len(moves.items)), choose.choice((2, 3, 5, 8))
        for _ in range(choose.choice((1, 2, 3))):
            item = min(max(centre + choose.randint(-width, width), 0), len(state) - 1)
            choice = choose.randrange(len(CHOICES))
            if moves.allows(item, choice):
                state[item] = choice
        moves.load(bytes(state))

    def _make(self, move: int) -> list[int]:
        changed = self._moves.make(move)
        self._note()
        return changed

    def _descend(self, limit: int, *, plunge: bool = False) -> bool:
        """Drop until the peak is within ``limit``. Returns whether that was reached."""
        while self._simulator.peak_bytes > limit and not self._done():
            move = self._cheapest(limit)
            if move is not None:
                self._make(move)
            elif not (plunge and self._plunge(limit)):
                return False
        return self._simulator.peak_bytes <= limit

    def _plunge(self, limit: int) -> bool:
        """Where no single move helps: a few that help at the peak, though they hurt elsewhere. Returns whether it did.

        Each item is changed once, so that a move is not taken back for the next.
        """
        before, peak = bytes(self._moves.state), self._simulator.peak_bytes
        tabu = np.zeros(len(self._moves.seconds), dtype=bool)
        for _ in range(PLUNGE):
            move = self._least_harmful(limit, tabu)
            if move is None:
                break
            self._make(move)
            tabu[self._moves.of([move // len(CHOICES)])] = True
            if self._simulator.peak_bytes < peak:
                return True
        self._moves.load(before)
        return False

    def _least_harmful(self, limit: int, tabu: np.ndarray) -> int | None:
        moves, live = self._moves, self._simulator.bytes_at()
        gain = np.where(moves.usable & ~tabu, -moves.weigh(live > limit), 0)
        found = [int(m) for m in np.argsort(-gain, kind="stable")[:PATIENCE] if gain[m] > 0]
        return max(found, key=lambda m: _excess_taken(moves.look(m), live, limit), default=None)

    def _cheapest(self, limit: int) -> int | None:
        """The move with the fewest seconds for what it takes out of the ticks above ``limit``."""
        moves, live = self._moves, self._simulator.bytes_at()
        gain = -moves.weigh(live > limit)
        useful = moves.usable & (gain > 0)
        prices = np.where(useful, _price(moves.seconds, np.maximum(gain, 1)), np.inf)
        best, best_price = None, np.inf
        for _ in range(PATIENCE):
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
        while not self._done():
            live = self._simulator.bytes_at()
            load = moves.weigh(live > self._scaled(limit, CROWDED))
            reward = np.where(moves.usable & ~blocked, -moves.seconds / np.maximum(load, 1), 0.0)
            move = self._most_rewarding(reward, blocked, live, limit)
            if move is None:
                return
            blocked[moves.of(self._make(move))] = False

    def _most_rewarding(self, reward: np.ndarray, blocked: np.ndarray, live: np.ndarray, limit: int) -> int | None:
        while True:
            move = int(reward.argmax())
            if reward[move] <= 0:
                return None
            reward[move] = 0.0
            trial = self._moves.look(move)
            if trial.seconds < -_NOTHING_S:
                if _fits(trial, live, limit):
                    return move
                blocked[move] = True


def _price(seconds: np.ndarray | float, gain: np.ndarray | int) -> np.ndarray | float:
    """Seconds for each byte taken; what costs nothing comes first, the largest gain before the smaller."""
    return np.where(np.asarray(seconds) > _NOTHING_S, seconds / gain, -1.0 * gain)


def _excess_taken(trial: Trial, live: np.ndarray, limit: int) -> int:
    """Bytes that a move takes out of the ticks above ``limit``, less what it adds above it."""
    taken = 0
    for first, end, level in trial.segments:
        excess = live[first:end] - limit
        taken += int(np.maximum(excess, 0).sum() - np.maximum(excess + level, 0).sum())
    return taken


def _fits(trial: Trial, live: np.ndarray, limit: int) -> bool:
    return all(level <= 0 or int(live[first:end].max()) + level <= limit for first, end, level in trial.segments)
