"""The errors a user can meet: what was wrong, what was found, what to do."""

from __future__ import annotations


class CTDRError(Exception):
    """Base of every error raised on purpose by this package.

    Args:
        problem: What is wrong, naming the argument and what was found.
        hint: What to do about it.
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
        problem: What is wrong, naming the budget.
        hint: The nearest remedy.
        least_peak_bytes: Smallest peak that any plan found reaches.
    """

    def __init__(self, problem: str, hint: str = "", *, least_peak_bytes: int = 0) -> None:
        super().__init__(problem, hint)
        self.least_peak_bytes = least_peak_bytes

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


class OffloadError(CTDRError, RuntimeError):
    """A tensor could not be moved away or brought back: a disk that is full, a limit that is reached."""


def first_line(error: BaseException) -> str:
    """What another program's error says, in one line, with its kind where it says nothing.

    Example:
        >>> first_line(KeyError("weight"))
        "KeyError: 'weight'"
    """
    lines = str(error).strip().splitlines()
    said = lines[0].rstrip(" .:") if lines else ""
    if isinstance(error, RuntimeError | ImportError) and said:  # their texts are sentences
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
