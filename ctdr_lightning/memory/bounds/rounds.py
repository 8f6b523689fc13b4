"""Bound and plan at once, in rounds: a program in whole numbers, its plan simulated, bytes limited where it broke them.

The first round limits bytes at one tick, where the plain step is highest. Its solution is a plan, which the simulator
plays. Where that is within the budget it is mostly the best plan, proven by its own program. Where it is not, the next
round limits bytes at the worst ticks too, with the rules of the tape (see ``tape_program``), and so on. Each round
bounds all plans from below; the bound is the best of theirs. Rounds end where a plan fits, where the solver comes to no
end, and where the program would be too large.

Complexity: a program of about the droppable values times the ticks, in whole numbers, a round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ctdr_lightning.memory.bounds.limited_ticks import LimitedTicks
from ctdr_lightning.memory.bounds.linear_program import Solution
from ctdr_lightning.memory.bounds.staged_program import StagedProgram, lives_of
from ctdr_lightning.memory.bounds.tape_program import TapeProgram
from ctdr_lightning.memory.simulator.actions import Action
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator

# Of the seconds that are recomputed, and nodes of the search tree. Most programs are solved at its root; where R at 0.3
# of its peak is not, four nodes took 30 s and raised the bound by 1 %. The limit is no clock, so that a trace has one
# bound.
WHOLE_GAP, WHOLE_NODES = 3e-3, 1
# Share of a step by which the solver's bound may be off: its tolerances.
TOLERANCE = 1e-6
# Six rounds leave RN18 at 0.4 of its peak 0.6 % above its bound after 8 s, a seventh took 11 s more and found nothing.
# Programs of so many variables take up to 5 s.
MOST_ROUNDS, MOST_VARIABLES = 6, 2_500


@dataclass(frozen=True, slots=True)
class Round:
    """Result of one round.

    Attributes:
        bound_seconds: No plan is faster; infinite where none fits.
        actions: The solution as a plan; None where the solver found none.
        excess_bytes: By how much its peak is over the budget; 0 where it fits.
        is_solved: Whether the solver came to its end before its limit of nodes.
    """

    bound_seconds: float
    actions: dict[int, Action] | None = None
    excess_bytes: int = 0
    is_solved: bool = True


class Rounds:
    """The rounds at one peak, each made when it is first asked for.

    Args:
        step: The step to plan.
        peak_bytes: Largest peak, weights included.

    Attributes:
        found: Results of the rounds so far.
    """

    def __init__(self, step: Prepared, peak_bytes: int) -> None:
        self._step = step
        self._limit = peak_bytes
        self._limited = LimitedTicks(step, peak_bytes)
        self._n_variables = 0
        self._raised_s = 0.0
        self.found: list[Round] = []

    @property
    def bound_seconds(self) -> float:
        """The best bound of the rounds so far, and of the relaxations noted since."""
        return max([self._raised_s, *(found.bound_seconds for found in self.found)])

    def raise_to(self, bound_seconds: float) -> None:
        """Take note of a bound that another program of the same peak gave: a relaxation."""
        self._raised_s = max(self._raised_s, bound_seconds)

    def __iter__(self) -> Iterator[Round]:
        """The rounds from the first on."""
        for n in range(MOST_ROUNDS):
            if n == len(self.found) and not self._go_on():
                return
            yield self.found[n]

    def _go_on(self) -> bool:
        """Make one more round; whether there was one to make."""
        if not self.found:
            self._solve(StagedProgram)
            return True
        last, limited, n_ticks = self.found[-1], self._limited, len(self._limited.ticks)
        if last.actions is None or not last.excess_bytes or not last.is_solved or not limited.add_worst(last.actions):
            return False
        if self._n_variables * len(limited.ticks) > MOST_VARIABLES * n_ticks:
            return False
        self._solve(TapeProgram)
        return True

    def _solve(self, kind: type[StagedProgram]) -> None:
        trace = self._step.trace
        staged = kind(trace, sorted(self._limited.ticks), self._limit, lives_of(self._step))
        self._n_variables = staged.program.n_variables
        self.found.append(self._round(staged, staged.program.solve(float("inf"), WHOLE_GAP, WHOLE_NODES)))

    def _round(self, staged: StagedProgram, solved: Solution | None) -> Round:
        plain_s = self._step.trace.seconds
        if solved is None:
            return Round(plain_s)
        actions = staged.actions_of(solved.values, 0.5)
        excess = max(Simulator(self._step, actions).peak_bytes - self._limit, 0)
        is_solved = solved.cost - solved.bound <= WHOLE_GAP * solved.cost + TOLERANCE
        return Round(plain_s * (1 + solved.bound - TOLERANCE), actions, excess, is_solved)


def rounds_of(step: Prepared, peak_bytes: int) -> Rounds:
    """The rounds of a step at one peak, kept with the step: bounds and plans, no programs."""
    return step.once(("rounds", peak_bytes), lambda: Rounds(step, peak_bytes))
