"""One progress bar for work that takes over two seconds: rich if it is installed, plain lines otherwise.

Nested work, and work inside `one_bar`, shares the outer bar, which shows every level:
``choose: 3 of 15, factorize: 2 of 8``.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

from ctdr_lightning.basics.interrupts import interrupts_held

T = TypeVar("T")
Show = Callable[[str, int], None]
# Shorter work needs no bar.
PATIENCE_S = 2.0
# Lines in a file stay: each waits so many times longer than the one before, up to a minute, so that ten minutes are
# some 20 lines and not 300.
_CALMER, _LONGEST_S = 1.5, 60.0


@dataclass(eq=False)
class _Task:
    label: str
    total: int | None = None
    n_done: int | None = None

    def __str__(self) -> str:
        if self.n_done is None:
            return self.label
        return f"{self.label}: {self.n_done}" if self.total is None else f"{self.label}: {self.n_done} of {self.total}"


class _Bar:
    """The work under way, shown on the screen after a delay.

    A Ctrl-C may come between any two lines, also those that close a bar. So only the frames of the work under way
    hold a bar, a bar that dies with them is taken down, and no lock stays held.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._start_s = enabled, time.perf_counter()
        self.tasks: list[_Task] = []
        self._show: Show | None = None
        self._lock = threading.Lock()
        timer = threading.Timer(PATIENCE_S, _say, [weakref.ref(self)])  # fires even if the work never reports progress
        timer.daemon = True
        self._ends = [weakref.finalize(self, timer.cancel)]
        if enabled:
            timer.start()

    def say(self) -> None:
        """Show the present state of the work."""
        if time.perf_counter() - self._start_s < PATIENCE_S:
            return
        with interrupts_held(), self._lock:
            tasks = list(self.tasks) if self._enabled else []
            if tasks and self._show is None:
                self._show, stop = open_bar(tasks[0].label, tasks[0].total)
                self._ends.append(weakref.finalize(self, stop))
            if tasks and self._show is not None:
                self._show(", ".join(map(str, tasks)), tasks[0].n_done or 0)

    def close(self) -> None:
        """Take it down."""
        with interrupts_held(), self._lock:
            self._enabled = False
            for end in self._ends:
                end()


def _say(bar: weakref.ref[_Bar]) -> None:
    there = bar()
    if there is not None:
        there.say()


_now: weakref.ref[_Bar] | None = None


def _open() -> _Bar | None:
    return None if _now is None else _now()


@contextmanager
def one_bar(enabled: bool = True) -> Iterator[None]:
    """Show all that is tracked inside in one bar.

    Args:
        enabled: False shows nothing, whatever is tracked inside.
    """
    global _now
    if _open() is not None:
        yield
        return
    bar = _Bar(enabled)
    try:
        _now = weakref.ref(bar)
        yield
    finally:
        _now = None
        bar.close()


@contextmanager
def doing(label: str) -> Iterator[None]:
    """Show a label in the current bar, if there is one, for the duration of the block."""
    bar = _open()
    if bar is None:
        yield
        return
    with _under_way(bar, _Task(label)):
        yield


@contextmanager
def _under_way(bar: _Bar, task: _Task) -> Iterator[None]:
    bar.tasks.append(task)
    bar.say()
    try:
        yield
    finally:
        bar.tasks.remove(task)


def track(items: Iterable[T], label: str, *, total: int | None = None, enabled: bool = True) -> Generator[T]:
    """Iterate over items; once that has lasted two seconds, show on stderr how far it is.

    Args:
        items: Items to iterate over.
        label: Name of the work ("factorize").
        total: Number of items; None where it is not known.
        enabled: False shows nothing.
    """
    if not enabled:
        yield from items
        return
    task = _Task(label, total)
    with one_bar():
        bar = _open()
        assert bar is not None
        with _under_way(bar, task):
            for task.n_done, item in enumerate(items):
                bar.say()
                yield item


def _plain() -> Show:
    last_s, pause_s = -math.inf, PATIENCE_S

    def show(text: str, n_done: int) -> None:
        nonlocal last_s, pause_s
        if time.perf_counter() - last_s > pause_s:
            last_s, pause_s = time.perf_counter(), min(_CALMER * pause_s, _LONGEST_S)
            print(text, file=sys.stderr, flush=True)

    return show


def open_bar(label: str, total: int | None) -> tuple[Show, Callable[[], None]]:
    """Open a bar on a terminal, or plain lines elsewhere.

    Args:
        label: Name of the work.
        total: Number of items; None where it is not known.

    Returns:
        A function that shows the present item and the number of items done, and one that takes the bar down.
    """
    if find_spec("rich") is None or not sys.stderr.isatty():
        return _plain(), lambda: None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    bar.start()
    return lambda text, n_done: bar.update(task, description=text, completed=n_done), bar.stop
