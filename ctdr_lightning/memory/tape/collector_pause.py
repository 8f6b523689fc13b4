"""Holds Python's garbage collector back while a forward builds the tape's graph.

A captured call is about ten objects that live until the backward. The collector counts allocations without releases
and takes that for a leak: it would look through every object of the program every few steps, for more time than the
tape itself needs. Nothing here waits for it, as the graph has no cycles.
"""

from __future__ import annotations

import gc
from types import TracebackType


class CollectorPause:
    """While entered, the garbage collector does not run by itself; afterwards it does if it did before."""

    def __enter__(self) -> CollectorPause:
        self._ran = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._ran:
            gc.enable()
