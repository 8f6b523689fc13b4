"""Plans from the relaxed staged program: the solution behind the lower bound, rounded to whole actions.

At most budgets one tick binds, where the plain step is highest. The program with that tick alone is nearly a knapsack:
all its numbers but a few are 0 or 1, and the rounded plan is a few hundredths of a percent above the bound. It is found
in the time of one linear program (0.1 s for DenseNet-121), where a search from the plain plan took five seconds and
ended 5 % above. The rounded plan may exceed the budget a little, or leave some of it: local search repairs both. With
one tick the program is solved in whole numbers first, which takes little longer: R and RN18 at half their peak have
their best plan so in .06 s, proven, where rounding and search took 1 to 2 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ctdr_lightning.memory.bounds.lower_bound import whole_numbers
from ctdr_lightning.memory.bounds.staged_program import StagedProgram, choose_ticks, lives_of
from ctdr_lightning.memory.plans.actions import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator


def whole_plans(step: Prepared, budget_bytes: int) -> Iterator[dict[int, Action]]:
    """The plan of the program in whole numbers, with bytes limited at one tick; nothing where that does not fit."""
    staged, found = whole_numbers(step, budget_bytes)
    if found is not None:
        actions = rounded(staged, found.values, 0.5)
        if Simulator(step, actions).peak_bytes <= budget_bytes:
            yield actions


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
            actions = rounded(program, solution.values, threshold)
            if actions not in seen:
                seen.append(actions)
                yield actions


def rounded(staged: StagedProgram, numbers: np.ndarray, threshold: float) -> dict[int, Action]:
    """Whole actions from shares.

    Args:
        staged: The program.
        numbers: Its solution, one number a variable.
        threshold: From which share on a value counts as held, and an op, from one less it, as run again.

    Returns:
        What the tape is to do so that the values of the solution are held and its ops run again.
    """
    trace = staged.trace
    held = {key for key, variable in staged.present.items() if numbers[variable] > threshold}
    again = Counter(op for (_, op), variable in staged.runs.items() if numbers[variable] > 1 - threshold)
    readers = Counter(source for op in again for source in set(trace.ops[op].inputs))
    intervals: dict[int, list[int]] = {v: [] for op in again for v in trace.ops[op].outputs if v >= 0}
    for interval, value in sorted(staged.present):
        intervals.setdefault(value, []).append(interval)
    actions: dict[int, Action] = {}
    for value, where in intervals.items():
        runs = again[trace.values[value].op]
        if not runs and where and (where[0], value) in held:
            actions[value] = KEEP
        elif trace.values[value].saves and where:
            actions[value] = RECOMPUTE_EACH if runs > 1 else RECOMPUTE
        elif runs == 1 and (readers[value] > 1 or any((interval, value) in held for interval in where)):
            actions[value] = RECOMPUTE
    return actions
