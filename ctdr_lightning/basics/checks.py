"""Argument checks whose errors name the argument, the value found and a valid one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from ctdr_lightning.basics.errors import ConfigError

T = TypeVar("T")


def whole(name: str, value: Any, *, least: int) -> None:
    """Require an integer of at least ``least``.

    Raises:
        ConfigError: If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}, found {value!r}.", f"Write {least} or more."
        )


def real(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> None:
    """Require a finite number within bounds (``above`` excludes its bound).

    Raises:
        ConfigError: If it is anything else.
    """
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if ok and value >= least and value > above and value <= most:
        return
    bounds = [f"at least {least}"] * (least > -math.inf) + [f"above {above}"] * (above > -math.inf)
    bounds += [f"at most {most}"] * (most < math.inf)
    wanted = " and ".join(bounds) or "finite"
    raise ConfigError(f"{name} must be a number, {wanted}, found {value!r}.", f"Write a number that is {wanted}.")


def one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """Require one of a few words.

    Raises:
        ConfigError: If it is anything else.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, found {value!r}.", f"Write {choices[0]!r}.")


def known(registry: Mapping[str, Any], name: str, value: Any) -> None:
    """Require a name of a registry.

    Raises:
        ConfigError: If it is another name, or no text.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} is not a name.", f"Valid names: {', '.join(registry)}.")
    registry[value]


def boolean(name: str, value: Any) -> None:
    """Require True or False.

    Raises:
        ConfigError: If it is anything else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.", "Write True or False.")


def from_mapping(kind: type[T], value: Any, where: str) -> T:
    """Build a dataclass from a mapping; an instance is returned unchanged.

    Raises:
        ConfigError: If ``value`` is not a mapping or names a field that ``kind`` does not have.
    """
    if isinstance(value, kind):
        return value
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold entries, found {value!r}.", f"Entries: {', '.join(names)}.")
    for key in value:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            meant = f"Did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{where} has the unknown entry {key!r}.", f"{meant}Entries: {', '.join(names)}.")
    return kind(**value)
