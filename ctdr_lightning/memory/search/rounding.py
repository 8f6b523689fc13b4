"""Plans from the relaxed staged program: the solution behind the lower bound, rounded to whole actions.

At most budgets one tick binds, where the plain step is highest. The program with that tick alone is nearly a knapsack:
all its numbers but a few are 0 or 1, and the rounded plan is a few hundredths of a percent above the bound. It is found
in the time of one linear program (0.1 s for DenseNet-121), where a search from the plain plan took five seconds and
ended 5 % above. The rounded plan may exceed the budget a little, or leave some of it: local search repairs both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ctdr_lightning.memory.bounds.staged_program import StagedProgram, choose_ticks, lives_of
from ctdr_lightning.memory.plans.actions import Action
from ctdr_lightning.memory.simulator.prepared import Prepared


def relaxed_plans(
    step: Prepared,
    budget_bytes: int,
    starts: Iterable[tuple[int, float]],
    thresholds: Iterable[float],
) -> Iterator[dict[int, Action]]:
    """Solve the relaxation at the budget and at lower ones; round each solution at each threshold.

    Args:
        step: The recorded step.
        budget_bytes: The budget.
        starts: At how many ticks bytes are limited, and by how much the budget is lowered, as a share of the plain peak
            above the weights.
        thresholds: From which share on a value is held.

    Yields:
        Plans of which each differs from those before; none of a start whose relaxation has no solution.
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
