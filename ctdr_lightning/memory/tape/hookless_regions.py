"""Parts of a step in which torch allows no saved-tensor hooks: ``torch.func.grad`` and its kind, and explicit blocks.

Such a part begins with ``torch.autograd.graph.disable_saved_tensors_hooks``, which fails where hooks are on the stack.
So ours leave it first and come back afterwards: tensors saved in between are held by autograd itself, as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.autograd import graph

_ENTRY = "disable_saved_tensors_hooks"


class HooklessRegions:
    """While entered, takes hooks off the stack where they are not allowed.

    Args:
        leave: Takes the hooks off if they are on top; returns a function that puts them back, or None.

    Attributes:
        pin: Why ops may not be replayed now: in such a part nothing that is saved is ours to drop. Empty elsewhere.
    """

    def __init__(self, leave: Callable[[], Callable[[], None] | None]) -> None:
        self.pin = ""
        self._leave = leave

    def __enter__(self) -> HooklessRegions:
        self._original, self._thread = getattr(graph, _ENTRY), threading.get_ident()
        setattr(graph, _ENTRY, self._without_hooks)  # torch calls nobody when such a part begins
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(graph, _ENTRY, self._original)

    @contextmanager
    def _without_hooks(self, error_message: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            with self._original(error_message):
                yield
            return
        come_back, before = self._leave(), self.pin
        self.pin = "where torch allows no saved-tensor hooks"
        try:
            with self._original(error_message):
                yield
        finally:
            self.pin = before
            if come_back is not None:
                come_back()
