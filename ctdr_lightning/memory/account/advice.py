"""From a batch that does not fit its budget to the changes that would let it: each tried, the nearest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.account.batch import BatchAccount

MEMORY = "memory=Memory"  # the group of the callback's arguments


@dataclass(frozen=True, slots=True)
class Change:
    """An argument that makes a batch smaller, and leaves every result unchanged unless its note says otherwise.

    Attributes:
        owner: The call that takes the argument.
        argument: Its name.
        value: Its value.
        account: The batch with it.
        peak_bytes: The peak of that batch under its plan.
        note: Further words on that peak.

    Example:
        >>> from ctdr_lightning.memory import Trace
        >>> print(Change("Adam", "fused", True, BatchAccount(Trace((), (), (), 0)), 2**20))
        use Adam(..., fused=True), with which it takes 1.0 MiB
    """

    owner: str
    argument: str
    value: Any
    account: BatchAccount
    peak_bytes: int
    note: str = ""

    def __str__(self) -> str:
        return f"use {self.owner}(..., {self.argument}={self.value!r}), {self.result}"

    @property
    def as_option(self) -> str:
        """The change as an option of the command."""
        return f"write --{self.argument.replace('_', '-')} {self.value}, {self.result}"

    @property
    def result(self) -> str:
        """The peak, in words."""
        return f"with which it takes {format_bytes(self.peak_bytes)}{self.note}"


def nearest(changes: Iterable[Change], budget_bytes: int) -> Change | None:
    """The first change with which a batch keeps to its budget; later ones are not tried.

    Args:
        changes: From the one that costs least.
        budget_bytes: The budget.
    """
    return next((change for change in changes if change.peak_bytes <= budget_bytes), None)
