"""What is made once for each trace and kept for as long as the trace lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from ctdr_lightning.memory.trace import Trace

T = TypeVar("T")


class PerTrace(Generic[T]):
    """Remembers results by the identity of the trace that they were made from."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Trace], dict[Hashable, T]]] = {}

    def get(self, trace: Trace, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned the first time that it was asked for, for this trace and key."""
        identity = id(trace)
        if identity not in self._known:
            gone = weakref.ref(trace, lambda _: self._known.pop(identity, None))
            self._known[identity] = (gone, {})
        made = self._known[identity][1]
        if key not in made:
            made[key] = make()
        return made[key]
