"""Results derived from an immutable object: computed on first use, cached for the object's lifetime."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class MadeOnce:
    """For classes of which more follows than they should know themselves."""

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result for this key; call ``make`` on first use."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or another process, makes it again: not all that was made can be pickled."""
        return {name: kept for name, kept in self.__dict__.items() if name != "_made"}
