"""A progress bar for what takes over two seconds: rich where it is installed, plain lines otherwise."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Iterable
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")
# What is done sooner needs no bar.
PATIENCE_S = 2.0


def track(items: Iterable[T], label: str, *, total: int, enabled: bool = True) -> Generator[T]:
    """Iterate over items; once that has lasted two seconds, show on stderr how far it is.

    Args:
        items: What to iterate over.
        label: What is being done ("factorize").
        total: How many items there are.
        enabled: False shows nothing.
    """
    start_s = time.perf_counter()
    show: Callable[[int], None] | None = None
    stop: Callable[[], None] | None = None
    try:
        for n_done, item in enumerate(items):
            if enabled and show is None and time.perf_counter() - start_s > PATIENCE_S:
                show, stop = open_bar(label, total)
            if show is not None:
                show(n_done)
            yield item
    finally:
        if stop is not None:
            stop()


def _plain(label: str, total: int) -> Callable[[int], None]:
    last_s = -math.inf

    def show(n_done: int) -> None:
        nonlocal last_s
        if time.perf_counter() - last_s > PATIENCE_S:
            last_s = time.perf_counter()
            print(f"{label}: {n_done} of {total}", file=sys.stderr, flush=True)

    return show


def open_bar(label: str, total: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Open a bar on a terminal, or plain lines elsewhere.

    Args:
        label: Stands before the count.
        total: How many items there are.

    Returns:
        A function that shows how many are done, and one that takes the bar down.
    """
    if find_spec("rich") is None or not sys.stderr.isatty():
        return _plain(label, total), lambda: None
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    bar.start()
    return lambda n_done: bar.update(task, completed=n_done), bar.stop
