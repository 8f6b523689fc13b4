"""What moves bytes beside the step: a thread on a processor, a stream on a GPU. One lane a direction, in order."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """The step goes on only once the copy is done."""
        ...


class Lane(Protocol):
    """Copies in the order in which they were asked for."""

    def copy(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        """Start to copy, once the step has made the source and ``after`` is done."""
        ...

    def close(self) -> None:
        """Wait for all copies."""
        ...


class _Done:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class ThreadLane:
    """Copies on a thread: torch's copies let go of the interpreter's lock.

    Attributes:
        rate_bytes_per_s: Speed of a slower link to imitate; None copies as fast as the machine does.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self.rate_bytes_per_s: float | None = None

    def copy(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        """Start to copy on the thread."""
        return _Done(self._thread.submit(self._copy, [target, source], after))

    def _copy(self, tensors: list[Tensor], after: Ticket | None) -> None:
        target, source = tensors
        tensors.clear()  # the pool's thread keeps its arguments for a moment after the result is there
        if after is not None:
            after.wait()
        begin_s = time.perf_counter()
        target.copy_(source)
        if self.rate_bytes_per_s is not None:
            time.sleep(max(source.nbytes / self.rate_bytes_per_s - (time.perf_counter() - begin_s), 0.0))

    def close(self) -> None:
        """Wait for all copies and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class _Recorded:
    """A copy on a stream; the event is recorded behind it."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        # The stream waits, not Python. What the step's stream frees afterwards is reused after the copy in the order of
        # that stream, so that no `record_stream` is needed.
        torch.cuda.current_stream().wait_event(self.event)


class StreamLane:
    """Copies on a CUDA stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def copy(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        """Start to copy on the stream."""
        # Asked for outside of `with stream`: inside, the current stream is the lane's, which would wait for itself.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if isinstance(after, _Recorded):
                self._stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Recorded(event)

    def close(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()
