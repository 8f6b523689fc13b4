"""Argument checks whose errors name the argument, the value found and a valid one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from ctdr_lightning.basics.errors import ConfigError, meant

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


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
    names = _fields(kind)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold entries, found {value!r}.", f"Entries: {_listed(names)}.")
    for key in value:
        if key not in names:
            raise ConfigError(
                f"{where} has the unknown entry {key!r}.", f"{meant(key, names)}Entries: {_listed(names)}."
            )
    return kind(**value)


def named_arguments(**groups: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function name the nearest argument where it is given one that it does not have.

    Args:
        groups: By the name of an argument that is a mapping, the dataclass of its fields.

    Example:
        >>> @named_arguments()
        ... def rest(seconds=0): ...
        >>> rest(second=1)
        Traceback (most recent call last):
        ctdr_lightning.basics.errors.ConfigError: rest() has no argument 'second'.
        HINT: Did you mean 'seconds'? Arguments: seconds.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = [name for name in signature(function).parameters if name != "self"]
        called = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for key, value in kwargs.items():
                if key not in names:
                    inner = next((name for name, kind in groups.items() if key in _fields(kind)), None)
                    near = f"It is one of {inner}={{{key!r}: {value!r}}}. " if inner else meant(key, names)
                    raise ConfigError(f"{called}() has no argument {key!r}.", f"{near}Arguments: {_listed(names)}.")
            return function(*args, **kwargs)

        return checked

    return decorate


def _fields(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]  # type: ignore[arg-type]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
