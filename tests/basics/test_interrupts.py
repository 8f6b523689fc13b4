"""Signals at every line of a block that must be whole, and of what puts a block's changes back."""

import gc
import os
import signal
import sys
import threading
import weakref

import pytest

from ctdr_lightning.basics.interrupts import interrupts_held, put_back_after
from tests import forks


class Handled(Exception):
    pass


def raise_handled(number, frame):
    raise Handled


@pytest.fixture(autouse=True)
def _handler():
    before = signal.signal(signal.SIGINT, raise_handled)
    yield
    assert signal.getsignal(signal.SIGINT) is raise_handled, "the handler is put back"
    signal.signal(signal.SIGINT, before)


def at_line(n, function):
    """Run a function with a signal at the n-th line that runs in it or below it, and whether there was such a line."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == n:
                interrupt()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except Handled:
        return True
    finally:
        sys.settrace(before)
    assert count < n, "the signal was lost"
    return False


def put_back_wherever_a_signal_comes():
    def run():
        with put_back_after(lambda: (there.clear(), there.append("first"))):
            there.append("second")
            there.append("third")

    signal.signal(signal.SIGINT, raise_handled)
    n = 1
    there = ["first"]
    while at_line(n, run):
        assert there == ["first"], n
        n += 1
    assert n > 20
    assert there == ["first"]


def test_what_a_block_changed_is_put_back_wherever_a_signal_comes():
    # A process of its own: Python 3.11 never forgets an exception that is being handled where a signal comes.
    assert forks.run(put_back_wherever_a_signal_comes) == [0]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def held(there):
    with interrupts_held():
        interrupt()
        there.append("first")
        interrupt()
        there.append("second")


def in_the_block(there):
    with put_back_after(there.clear):
        there.append("first")
        interrupt()
        there.append("never")


def one_inside_the_other(there):
    with put_back_after(lambda: there.append("outer")):
        with put_back_after(lambda: there.append("inner")):
            interrupt()
        there.append("never")


@pytest.mark.parametrize(
    ("block", "left"), [(held, ["first", "second"]), (in_the_block, []), (one_inside_the_other, ["inner", "outer"])]
)
def test_a_signal_waits_for_the_end_of_what_is_held_and_of_the_undoing(block, left):
    there = []
    with pytest.raises(Handled):
        block(there)
    assert there == left


def test_in_another_thread_nothing_is_held():
    there = ["changed"]

    def work():
        with interrupts_held(), put_back_after(there.clear):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert there == []


def test_nothing_of_the_block_is_kept_alive_when_it_is_over():
    class Large:
        pass

    def block(large):
        with put_back_after(lambda: large):
            pass

    large = Large()
    alive = weakref.ref(large)
    gc.disable()
    try:
        block(large)
        del large
        assert alive() is None
    finally:
        gc.enable()
