"""Ctrl-C at any line of the package's own code, for tests of what an interrupt leaves behind."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager

_PACKAGE = "ctdr_lightning"


class LineCounter:
    """Counts the lines of the package that run inside of some of its functions; may interrupt at one of them.

    Args:
        inside: Code objects; lines are counted while one of them is on the stack.
        at: The line to be interrupted at, from 1; None only counts.

    Attributes:
        count: Lines that have run.
        firsts: The number at which each line of each file ran first.
    """

    def __init__(self, inside, at=None):
        self.inside, self.at, self.count, self.depth = inside, at, 0, 0
        self.firsts = {}

    def call(self, frame, event, argument):
        if frame.f_code in self.inside:
            self.depth += 1
            return self.outermost
        return self.line if self.depth and _PACKAGE in frame.f_code.co_filename else None

    def outermost(self, frame, event, argument):
        if event == "return":
            self.depth -= 1
        else:
            self.line(frame, event, argument)
        return self.outermost

    def line(self, frame, event, argument):
        if event == "line" and self.depth:
            self.count += 1
            self.firsts.setdefault((frame.f_code.co_filename, frame.f_lineno), self.count)
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)
        return self.line


def spread(counter, n_points):
    """Numbers of lines to interrupt at: evenly over the run, and evenly over the distinct lines of the code.

    Most lines that run are loops of the solvers; the distinct ones are mostly those that change a model.
    """
    firsts = sorted(counter.firsts.values())
    over_time = {1 + (2 * point + 1) * counter.count // (2 * n_points) for point in range(n_points)}
    over_code = {firsts[(2 * point + 1) * len(firsts) // (2 * n_points)] for point in range(n_points)}
    return sorted(over_time | over_code)


@contextmanager
def counting(*functions, at=None):
    """Run a block under a `LineCounter` for functions; SIGINT has Python's own handler afterwards again."""
    counter = LineCounter({function.__code__ for function in functions}, at)
    before = sys.gettrace()
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(counter.call)
    try:
        yield counter
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it after the first
