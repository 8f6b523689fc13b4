"""From an account and a budget to the peak of the best plan."""

from __future__ import annotations

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.traces.trace import Trace


def planned_peak_bytes(account: BatchAccount, budget_bytes: int, policy: str) -> int:
    """The peak of a batch under its best plan; more than the budget where none fits.

    Args:
        account: The batch.
        budget_bytes: The budget.
        policy: The memory policy's name.
    """
    if account.floor_bytes > budget_bytes:
        return account.floor_bytes
    try:
        return account.peak_bytes(plan(account.standing, budget_bytes, policy))
    except InfeasibleBudgetError as error:
        return max(error.least_peak_bytes, budget_bytes + 1)


def least_peak_bytes(step: Trace, enough_bytes: int, policy: str) -> int:
    """The least peak of a step; where it fits into as many bytes as are enough, that plan's.

    Args:
        step: With all resident bytes.
        enough_bytes: A peak below which a smaller one gains nothing.
        policy: The memory policy's name.
    """
    try:
        return plan(step, enough_bytes, policy).peak_bytes
    except InfeasibleBudgetError as error:
        return error.least_peak_bytes
