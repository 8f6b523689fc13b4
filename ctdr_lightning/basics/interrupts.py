"""Ctrl-C and other signals wait while a change is made that must be whole or absent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Deliver signals that arrive in the block when it is over, each once.

    Only signals with a handler in Python wait; the others cannot stop at half of a statement. Python runs handlers in
    the main thread alone, so in any other thread nothing has to be done.

    Example:
        >>> with interrupts_held():
        ...     done = ["first", "second"]
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number not in arrived:
            arrived.append(number)

    # The interrupt's own handler returns last: it may raise at once, and nothing must be left to put back then.
    numbers = sorted(signal.valid_signals(), key=lambda number: number == signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers if callable(signal.getsignal(number))}
    for number in reversed(handlers):
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)
