"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any

from ctdr_lightning.basics.errors import ConfigError

KIB, MIB, GIB = 2**10, 2**20, 2**30
_LEAST_BUDGET_BYTES = 1024  # no step takes less; a number without a unit was meant otherwise
_SCALE = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
}  # fmt: skip
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
_FRACTION = re.compile(r"\s*0?\.\d+\s*")
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | float | str, *, total_bytes: int | None = None, name: str = "memory_budget") -> int:
    """Read a byte count: an int, a string such as ``"8GiB"``, or a fraction of ``total_bytes``.

    Args:
        value: Bytes as int, a number with a unit (``"512 MiB"``, ``"8GB"``), or a fraction: a float in ``(0, 1]``,
            ``"80%"`` or ``"0.8"``. NumPy's numbers count as Python's.
        total_bytes: The whole that a fraction refers to; None refuses fractions.
        name: Argument name used in errors.

    Returns:
        A positive number of bytes.

    Raises:
        ConfigError: If ``value`` is not a positive finite amount or its unit is unknown.

    Example:
        >>> parse_bytes("1.5 GiB")
        1610612736
    """
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(
            f"{name} must be bytes, a string with a unit or a fraction, found {value!r}.", 'Write "8GiB".'
        )
    shown = repr(value)
    if isinstance(value, str):
        if not is_share(value):
            return _parse_text(value, name)
        value = float(value.rstrip(" %")) / (100 if "%" in value else 1)
        if value > 1:
            raise ConfigError(f"{name}={shown} is more than the device has.", 'Write "8GiB" or "80%".')
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be positive and finite, found {shown}.", 'Write "8GiB" or 0.8.')
    if isinstance(value, int) or value > 1:
        return int(value)
    if total_bytes is None:
        raise ConfigError(
            f"{name}={shown} is a fraction, but the device's memory is not known here.", 'Write bytes: "8GiB".'
        )
    return int(value * total_bytes)


def parse_budget(value: int | float | str, *, total_bytes: int | None = None, name: str = "memory_budget") -> int:
    """Read a budget, as `parse_bytes` reads bytes; no step fits a few bytes.

    Raises:
        ConfigError: If it cannot be read, or a unit was forgotten.

    Example:
        >>> parse_budget("8")
        Traceback (most recent call last):
        ctdr_lightning.basics.errors.ConfigError: memory_budget='8' is 8 bytes.
        HINT: Did you mean "8GiB"?
    """
    n_bytes = parse_bytes(value, total_bytes=total_bytes, name=name)
    if n_bytes < _LEAST_BUDGET_BYTES:
        number = str(value).strip(" bB")
        raise ConfigError(f"{name}={value!r} is {n_bytes} bytes.", f'Did you mean "{number}GiB"?')
    return n_bytes


def is_share(text: str) -> bool:
    """Whether a text is a share of a device's memory.

    Example:
        >>> is_share("80%"), is_share("0.8"), is_share("8GiB")
        (True, True, False)
    """
    return bool(_PERCENT.fullmatch(text) or _FRACTION.fullmatch(text))


def plain_number(value: Any) -> Any:
    """Convert a NumPy number to Python's own; return anything else unchanged.

    Example:
        >>> import numpy as np
        >>> plain_number(np.int64(8)), plain_number("8GiB"), plain_number(True)
        (8, '8GiB', True)
    """
    if isinstance(value, bool):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def _parse_text(text: str, name: str) -> int:
    match = _PATTERN.fullmatch(text)
    scale = _SCALE.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ConfigError(
            f"{name}={text!r} is not an amount of memory.", 'Write a number and a unit: "8GiB", "512 MiB".'
        )
    found = int(float(match[1]) * scale)
    if found <= 0:
        raise ConfigError(f"{name}={text!r} is not positive.", 'Write "8GiB".')
    return found


def format_bytes(n_bytes: float) -> str:
    """Write bytes in the largest binary unit that keeps the number above one.

    Example:
        >>> format_bytes(3 * 2**20)
        '3.0 MiB'
    """
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}" if unit != "GiB" else f"{size:.2f} GiB"
        size /= 1024
    raise AssertionError("unreachable")


def as_given(value: int | float | str, n_bytes: float) -> str:
    """An amount in the user's own words where these are words; otherwise the bytes that it came to.

    Example:
        >>> as_given("10KiB", 10240), as_given(10240, 10240)
        ('10KiB', '10.0 KiB')
    """
    return value.strip() if isinstance(value, str) else format_bytes(n_bytes)


def format_roomy(n_bytes: float) -> str:
    """Format bytes rounded up, with 1 % to spare: for amounts that a user passes back as budgets.

    A search that is timed anew does not always find the very same least peak.

    Example:
        >>> format_roomy(100 * 2**20)
        '101.0 MiB'
    """
    size = float(n_bytes) * 1.01
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            digits = {"B": 1, "GiB": 100}.get(unit, 10)
            return f"{math.ceil(size * digits - 1e-6) / digits:.{len(str(digits)) - 1}f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Write seconds as s, ms, or us.

    Example:
        >>> format_seconds(0.0021)
        '2.1 ms'
    """
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.0f} us"
