"""Plans from the relaxed staged program: the solution behind the lower bound, rounded to whole actions.

At most budgets one tick binds, where the plain step is highest. The program with that tick alone is nearly a knapsack:
all its numbers but a few are 0 or 1, and the rounded plan is a few hundredths of a percent above the bound. It is found
in the time of one linear program (0.1 s for DenseNet-121), where a search from the plain plan took five seconds and
ended 5 % above. The rounded plan may exceed the budget a little, or leave some of it: local search repairs both.

At low budgets replayed values break the budget at ticks where the plain step is not highest. There the program is
*narrowed*: bytes are limited at the worst places of its plan, too, and it is solved again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ctdr_lightning.memory.bounds.limited_ticks import LimitedTicks
from ctdr_lightning.memory.bounds.staged_program import StagedProgram, choose_ticks, lives_of
from ctdr_lightning.memory.bounds.tape_program import TapeProgram
from ctdr_lightning.memory.simulator.actions import Action
from ctdr_lightning.memory.simulator.prepared import Prepared

# Programs in a row, and variables of one at most: it is solved in a second. For ResNet-50 at 0.2 of its peak the fourth
# gave the best plan of eleven; for the small TreeLSTM and LSTM larger programs took up to 9 s and were no help.
MOST_PROGRAMS, MOST_VARIABLES = 5, 5_000


def relaxed_plans(
    step: Prepared,
    budget_bytes: int,
    starts: Iterable[tuple[int, float]],
    thresholds: Iterable[float],
) -> Iterator[dict[int, Action]]:
    """Solve the relaxation at the budget and at lower ones; round each solution at each threshold.

    Args:
        step: The recorded step.
        budget_bytes: Largest peak allowed.
        starts: At how many ticks bytes are limited, and by how much the budget is lowered, as a share of the plain peak
            above the weights.
        thresholds: From which share on a value is held.

    Yields:
        Plans of which each differs from those before; a start whose relaxation has no solution yields no plan.
    """
    trace, plain_bytes, lives = step.trace, step.plain_bytes_at, lives_of(step)
    seen: list[dict[int, Action]] = []
    unit = step.plain_peak_bytes - trace.resident_bytes
    for n_ticks, margin in starts:
        limit = int(budget_bytes - margin * unit)
        program = StagedProgram(trace, choose_ticks(trace, plain_bytes, limit, n_ticks), limit, lives)
        solution = program.program.relax()
        if solution is None:
            continue
        for threshold in thresholds:
            actions = program.actions_of(solution.values, threshold)
            if actions not in seen:
                seen.append(actions)
                yield actions


def narrowed_plans(step: Prepared, budget_bytes: int) -> Iterator[tuple[float, dict[int, Action]]]:
    """Relaxations with bytes limited where the plan before broke the budget, each rounded at one half.

    Args:
        step: The recorded step.
        budget_bytes: Largest peak allowed.

    Yields:
        Of each relaxation, from the second on, the seconds that no plan goes below, and its plan: the first limits
        bytes at one tick.
    """
    limited, n_variables, n_ticks = LimitedTicks(step, budget_bytes), 0, 0
    for n in range(MOST_PROGRAMS):
        if n_variables * len(limited.ticks) > MOST_VARIABLES * n_ticks:
            return
        n_ticks = len(limited.ticks)
        staged = TapeProgram(step.trace, sorted(limited.ticks), budget_bytes, lives_of(step))
        solution, n_variables = staged.program.relax(), staged.program.n_variables
        if solution is None:
            return
        actions = staged.actions_of(solution.values, 0.5)
        if n:
            yield step.trace.seconds * (1 + solution.bound), actions
        if not limited.add_worst(actions):
            return
