"""Carriers of bytes in parallel to the step: a thread on a processor, a stream on a GPU. One lane per direction.

A step has more than one stream at times: a side stream of the user's, a graph's warm-up, a second device. Memory of a
GPU belongs to the stream on which it was allocated and is used again in the order of that stream, whoever lets it go.
A lane therefore remembers where it was asked: at its *moment*.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Moment(Protocol):
    """The place of the step at which a lane was asked."""

    def at_home(self) -> AbstractContextManager[object]:
        """Allocate in here: memory then belongs to the stream that asked first."""
        ...

    def hand_out(self, tensors: Sequence[Tensor]) -> None:
        """From now on the step uses tensors that were allocated at home, maybe on another stream."""
        ...


class Ticket(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """The step goes on only once the copies are done."""
        ...

    def finish(self) -> None:
        """The calling thread goes on only once the copies are done."""
        ...


class Lane(Protocol):
    """Copies in the order in which they were asked for."""

    def moment(self, tensors: Iterable[Tensor]) -> Moment:
        """The step's work so far on the devices of these tensors."""
        ...

    def copy(self, pairs: Sequence[Pair], after: Iterable[Ticket] = (), moment: Moment | None = None) -> Ticket:
        """Start to copy.

        Args:
            pairs: ``(target, source)``.
            after: Done before.
            moment: The step's work up to here is done before; None is now.
        """
        ...

    def close(self) -> None:
        """Wait for all copies."""
        ...


class _Anywhere:
    """On a processor the order of the step is the order of its calls."""

    def at_home(self) -> AbstractContextManager[object]:
        return nullcontext()

    def hand_out(self, tensors: Sequence[Tensor]) -> None:
        pass


_ANYWHERE = _Anywhere()


class _Done:
    def __init__(self, future: Future[None] | None = None) -> None:
        self._future = future

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    finish = wait


class ThreadLane:
    """Copies on a thread: torch's copies let go of the interpreter's lock.

    Attributes:
        rate_bytes_per_s: Speed of a slower link to imitate; None copies as fast as the machine does.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self.rate_bytes_per_s: float | None = None

    def moment(self, tensors: Iterable[Tensor]) -> Moment:
        """No place is special."""
        return _ANYWHERE

    def copy(self, pairs: Sequence[Pair], after: Iterable[Ticket] = (), moment: Moment | None = None) -> Ticket:
        """Start to copy on the thread."""
        return _Done(self._thread.submit(self._copy, list(pairs), tuple(after)))

    def _copy(self, pairs: list[Pair], after: Iterable[Ticket]) -> None:
        for ticket in after:
            ticket.wait()
        while pairs:
            target, source = pairs.pop(0)  # the pool's thread keeps its arguments for a moment after the result
            begin_s = time.perf_counter()
            target.copy_(source)
            if self.rate_bytes_per_s is not None:
                time.sleep(max(source.nbytes / self.rate_bytes_per_s - (time.perf_counter() - begin_s), 0.0))

    def close(self) -> None:
        """Wait for all copies and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class DirectLane:
    """Copies at once, on whatever thread asks."""

    def moment(self, tensors: Iterable[Tensor]) -> Moment:
        """No place is special."""
        return _ANYWHERE

    def copy(self, pairs: Sequence[Pair], after: Iterable[Ticket] = (), moment: Moment | None = None) -> Ticket:
        """Copy."""
        for target, source in pairs:
            target.copy_(source)
        return _Done()

    def close(self) -> None:
        """Nothing is under way."""


def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """The GPU on which one of the tensors is; None where all are on the processor."""
    return next((t.device for t in tensors if t.device.type == "cuda"), None)


class _Asked:
    """The current stream of each device, and an event behind its work so far."""

    def __init__(self, devices: Iterable[torch.device | None]) -> None:
        self.homes = {device: torch.cuda.current_stream(device) for device in devices}
        self.events = {device: home.record_event() for device, home in self.homes.items()}

    def at_home(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        for home in self.homes.values():
            stack.enter_context(torch.cuda.stream(home))
        return stack

    def hand_out(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            device = device_of([tensor])
            current = torch.cuda.current_stream(device)
            if current != self.homes[device]:
                tensor.record_stream(current)


class _Recorded:
    """Copies on a device's stream; the event is recorded behind them."""

    def __init__(self, event: torch.cuda.Event, device: torch.device | None, home: torch.cuda.Stream) -> None:
        self.event = event
        self._device, self._home = device, home

    def wait(self) -> None:
        # The streams wait, not Python. Memory that the home stream frees afterwards is reused after the copy in the
        # order of that stream, so that no `record_stream` is needed: it would leave the memory unusable for a while.
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self.event)
        if current != self._home:
            self._home.wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()


class _All:
    """Copies on several devices."""

    def __init__(self, tickets: list[_Recorded]) -> None:
        self.tickets = tickets

    def wait(self) -> None:
        for ticket in self.tickets:
            ticket.wait()

    def finish(self) -> None:
        for ticket in self.tickets:
            ticket.finish()


class StreamLane:
    """Copies on a CUDA stream of its own on every device that it is asked for.

    The copies of one call cost one wait and one event, however many they are.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device | None, torch.cuda.Stream] = {}

    def moment(self, tensors: Iterable[Tensor]) -> _Asked:
        """The current streams, and where they are."""
        return _Asked(dict.fromkeys(device_of([tensor]) for tensor in tensors))

    def copy(self, pairs: Sequence[Pair], after: Iterable[Ticket] = (), moment: Moment | None = None) -> Ticket:
        """Start to copy on the streams of the devices."""
        by_device: dict[torch.device | None, list[Pair]] = {}
        for pair in pairs:
            by_device.setdefault(device_of(pair), []).append(pair)
        # Asked for outside of `with stream`: inside, the current stream is the lane's, which would wait for itself.
        asked = moment if isinstance(moment, _Asked) else _Asked(by_device)
        events = [one.event for ticket in after if isinstance(ticket, _All) for one in ticket.tickets]
        return _All([self._on(device, some, events, asked) for device, some in by_device.items()])

    def _on(
        self, device: torch.device | None, pairs: list[Pair], after: list[torch.cuda.Event], asked: _Asked
    ) -> _Recorded:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        for event in (asked.events[device], *after):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _Recorded(event, device, asked.homes[device])

    def close(self) -> None:
        """Wait for all copies."""
        for stream in self._streams.values():
            stream.synchronize()
