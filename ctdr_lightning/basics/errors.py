"""Errors for users: each names the problem, the value found and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class CTDRError(Exception):
    """Base of every error raised on purpose by this package.

    Args:
        problem: The fault, with the argument's name and the value found.
        hint: The remedy.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        self.problem = problem
        self.hint = hint
        super().__init__(f"{problem}\nHINT: {hint}" if hint else problem)


class ConfigError(CTDRError, ValueError):
    """An argument, a pattern, or a name that cannot be used."""


class CheckpointError(CTDRError, RuntimeError):
    """A checkpoint, plan file, or trace file that cannot be read or does not fit the model."""


class InfeasibleBudgetError(CTDRError, RuntimeError):
    """No plan fits the memory budget.

    Args:
        problem: The fault, with the budget.
        hint: The nearest remedy.
        least_peak_bytes: Smallest peak that any plan found reaches.
        means: A means of the caller's that keeps the budget all the same; empty for none.
    """

    def __init__(self, problem: str, hint: str = "", *, least_peak_bytes: int = 0, means: str = "") -> None:
        super().__init__(problem, hint)
        self.least_peak_bytes, self.means = least_peak_bytes, means

    def but_first(self, remedy: str) -> InfeasibleBudgetError:
        """The same error with a nearer remedy before its own; the same where there is none.

        Example:
            >>> print(InfeasibleBudgetError("Nothing fits.", "Raise it.").but_first("use a disk").hint)
            Use a disk; or raise it.
        """
        if not remedy:
            return self
        hint = f"{remedy[0].upper()}{remedy[1:]}; or {self.hint[0].lower()}{self.hint[1:]}"
        return InfeasibleBudgetError(self.problem, hint, least_peak_bytes=self.least_peak_bytes)

    def or_else(self, remedy: str) -> InfeasibleBudgetError:
        """The same error with a further remedy after its own; the same where there is none.

        Example:
            >>> print(InfeasibleBudgetError("Nothing fits.", "Raise it.").or_else("use a disk").hint)
            Raise it; or use a disk.
        """
        if not remedy:
            return self
        hint = f"{self.hint.removesuffix('.')}; or {remedy}."
        return InfeasibleBudgetError(self.problem, hint, least_peak_bytes=self.least_peak_bytes)


class OffloadError(CTDRError, RuntimeError):
    """A tensor could not be moved away or brought back: a disk that is full, a limit that is reached."""


class ReplayError(CTDRError, RuntimeError):
    """A tensor that was dropped came back with other contents than it had; the gradients of the step are not right.

    Args:
        problem: The fault, with the operation and its module.
        hint: The remedy.
        pins: From value id of the plan's trace to the reason why it may not be made again.
        first_pins: Of these the ones before which nothing came back otherwise: the others may follow from them.
        read_by_others: Value ids of which a codec gave back less than a reader asked for.
        ticks: In a step that was being recorded, the ticks of the operations that may not run again.
        first_ticks: Of these the first ones, as of the pins.
    """

    def __init__(
        self,
        problem: str,
        hint: str = "",
        *,
        pins: Mapping[int, str] | None = None,
        first_pins: Iterable[int] = (),
        read_by_others: Iterable[int] = (),
        ticks: Iterable[int] = (),
        first_ticks: Iterable[int] = (),
    ) -> None:
        super().__init__(problem, hint)
        self.pins, self.first_pins = dict(pins or {}), frozenset(first_pins)
        self.read_by_others = frozenset(read_by_others)
        self.ticks, self.first_ticks = frozenset(ticks), frozenset(first_ticks)


def first_line(error: BaseException) -> str:
    """The first line of another program's error, or its type if it has no text.

    Example:
        >>> first_line(KeyError("weight"))
        "KeyError: 'weight'"
    """
    if isinstance(error, CTDRError):
        return error.problem.rstrip(" .:")
    lines = str(error).strip().splitlines()
    said = lines[0].rstrip(" .:") if lines else ""
    if isinstance(error, RuntimeError | ImportError) and said:  # their texts are sentences
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def meant(given: object, known: Iterable[str]) -> str:
    """The known name that is nearest to a given one, as the beginning of a hint; empty where none is near.

    Example:
        >>> meant("secnds", ["seconds", "bytes"])
        "Did you mean 'seconds'? "
    """
    close = get_close_matches(str(given), list(known), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
