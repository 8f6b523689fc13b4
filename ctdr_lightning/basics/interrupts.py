"""Blocks that a signal does not stop in the middle, and blocks whose undoing it does not stop."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


def interrupts_held() -> AbstractContextManager[None]:
    """Deliver signals that arrive in the block when it is over, each once.

    Only signals with a handler in Python wait; the others cannot stop at half of a statement. Python runs handlers in
    the main thread alone, so in any other thread nothing has to be done.

    Example:
        >>> with interrupts_held():
        ...     done = ["first", "second"]
    """
    return _held_where(lambda frame: True)


@contextmanager
def put_back_after(put_back: Callable[[], None]) -> Iterator[None]:
    """Run a function when the block is over; a signal comes in the block or after the function, never in it.

    A ``finally`` alone lets a signal in before its first statement has run.

    Args:
        put_back: Undoes the change that the block is about to make.

    Example:
        >>> there = ["first"]
        >>> with put_back_after(there.pop):
        ...     there.append("second")
        >>> there
        ['first']
    """
    here = inspect.currentframe()
    try:
        with _held_where(lambda frame: _runs(here, frame)):
            try:
                yield
            finally:
                put_back()
    finally:
        here = None  # a frame that holds itself keeps all that put_back needs until the garbage collector comes


def _runs(function: FrameType | None, frame: FrameType | None) -> bool:
    """Whether a function's frame is on the stack below another; one that has yielded is not."""
    while frame is not None and frame is not function:
        frame = frame.f_back
    return frame is not None


@contextmanager
def _held_where(holds: Callable[[FrameType | None], bool]) -> Iterator[None]:
    """Let signals wait for the block's end where a test of the frame that they arrive in says so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if not holds(frame):
            handlers[number](number, frame)
        elif number not in arrived:
            arrived.append(number)

    # The interrupt's own handler returns last: it may raise at once, and nothing must be left to put back then.
    numbers = sorted(signal.valid_signals(), key=lambda number: number == signal.SIGINT)
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {
        number: handler for number in numbers if callable(handler := signal.getsignal(number))
    }
    for number in reversed(handlers):
        signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)
