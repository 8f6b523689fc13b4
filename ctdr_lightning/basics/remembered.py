"""What is made once for each trace or plan and kept for as long as that lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """Remembers results by the identity of what they were made from."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], dict[Hashable, T]]] = {}

    def get(self, owner: object, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned the first time that it was asked for, for this owner and key."""
        identity = id(owner)
        if identity not in self._known:
            gone = weakref.ref(owner, lambda _: self._known.pop(identity, None))
            self._known[identity] = (gone, {})
        made = self._known[identity][1]
        if key not in made:
            made[key] = make()
        return made[key]
