"""Layer names by pattern: exact, glob, or regular expression; the most specific wins."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from ctdr_lightning.basics.errors import ConfigError

T = TypeVar("T")
_REGEX = "re:"


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a name: exact (a container means all within), glob, or ``re:`` and an expression.

    Raises:
        ConfigError: If the expression after ``re:`` is malformed.

    Example:
        >>> matches("layer4", "layer4.0.conv1"), matches("*.conv?", "layer4.0.conv1"), matches("re:.*conv[12]", "conv3")
        (True, True, False)
    """
    if pattern.startswith(_REGEX):
        try:
            return re.fullmatch(pattern[len(_REGEX) :], name) is not None
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}.", "Mend it.") from None
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _specificity(pattern: str, name: str) -> tuple[int, int]:
    literal = len(re.sub(r"[^\w.]", "", pattern.removeprefix(_REGEX)))
    if name == pattern:
        return 3, literal
    if pattern.startswith(_REGEX):
        return 0, literal
    return (1 if re.search(r"[*?\[]", pattern) else 2), literal


def lookup(mapping: Mapping[str, T], name: str, argument: str) -> T | None:
    """The value of the most specific pattern that means ``name``, or None.

    Exact names come first, then containers, globs and regular expressions; among equals the one with more literal
    characters.

    Raises:
        ConfigError: If two equally specific patterns say different things.
    """
    found = sorted((p for p in mapping if matches(p, name)), key=lambda p: _specificity(p, name), reverse=True)
    if not found:
        return None
    best = found[0]
    for other in found[1:]:
        if _specificity(other, name) == _specificity(best, name) and mapping[other] != mapping[best]:
            raise ConfigError(
                f"{argument}: patterns {best!r} and {other!r} both mean {name!r} and say different things.",
                f"Add the exact name: {{{name!r}: ...}}.",
            )
    return mapping[best]


def check_used(patterns: Iterable[str], names: Sequence[str], argument: str) -> None:
    """Refuse patterns that mean no layer.

    Raises:
        ConfigError: Naming the pattern and the closest layer name.
    """
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{argument}: {pattern!r} is not a pattern.", "Write a layer name or a glob.")
        if not any(matches(pattern, name) for name in names):
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ConfigError(
                f"{argument}: pattern {pattern!r} matches no layer that can be decomposed.",
                f"The closest name is {close[0]!r}." if close else "The model has none.",
            )


def selected(select: Sequence[str], name: str) -> bool:
    """Whether patterns choose a name: the last that means it decides; ``!`` leaves out, only ``!`` means all others."""
    chosen = all(pattern.startswith("!") for pattern in select)
    for pattern in select:
        if matches(pattern.removeprefix("!"), name):
            chosen = not pattern.startswith("!")
    return chosen
