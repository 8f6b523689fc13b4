"""Streams and events of a GPU that is not there, over real numbers on the processor.

A copy that a lane asks for runs as late as the waits allow, at once, or at random in between. Fresh memory is not a
number until something has landed in it. Every block of memory belongs to the stream on which it was allocated: who
frees it while another stream may still read or write it, in the order that the streams know of, has made a mistake,
whatever the copies did this time; the block is filled with rubbish at once, as its next owner would do.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import defaultdict
from contextlib import contextmanager
from itertools import count

import torch

from ctdr_lightning.memory.holders import lanes

RUBBISH = 255
SCHEDULES = ("late", "eager", "random")


class Machine:
    """Two devices, their streams and their memory.

    Args:
        schedule: When copies run.
        seed: Of the random schedule.

    Attributes:
        errors: What no program may do, in words.
    """

    def __init__(self, schedule="late", seed=0):
        self.schedule, self.draw = schedule, random.Random(seed)
        self.lock = threading.RLock()
        self.errors = []
        self.streams = []
        self.host_clock = {}
        self.blocks = weakref.WeakValueDictionary()
        self.pinned_bytes = []
        self.numbers = count()
        self.local = threading.local()
        self.home = [VirtualStream(torch.device("cuda", i), self, at_once=True) for i in range(2)]

    def install(self, monkeypatch):
        """Put it in the place of ``torch.cuda`` until the test is over."""
        self.plain_copy, self.plain_empty = torch.Tensor.copy_, torch.empty
        for name, value in {
            "Stream": lambda device=None: VirtualStream(device or self.current(None).device, self),
            "Event": lambda *_, **__: VirtualEvent(self),
            "stream": self.entered,
            "current_stream": self.current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None)
        monkeypatch.setattr(lanes, "device_of", self.device_of)
        monkeypatch.setattr(torch, "empty", self.empty)
        machine = self
        monkeypatch.setattr(torch.Tensor, "copy_", lambda t, s, non_blocking=False: machine.copy(t, s, non_blocking))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: machine.block_of(t).recorded.add(s))
        return self

    # Streams

    @property
    def entered_streams(self):
        """Of this thread: as in CUDA each has its own."""
        if not hasattr(self.local, "entered"):
            self.local.entered = []
        return self.local.entered

    def current(self, device=None):
        """The current stream of a device; of the current device without one."""
        entered = self.entered_streams
        if device is None:
            return entered[-1] if entered else self.home[0]
        return next((s for s in reversed(entered) if s.device == device), self.home[device.index or 0])

    @contextmanager
    def entered(self, stream):
        self.entered_streams.append(stream)
        try:
            yield
        finally:
            self.entered_streams.pop()

    def step_stream(self, device=0, *, at_once=True):
        """Another stream of the step's; where it is not ``at_once``, what is asked of it with ``do`` runs late."""
        return VirtualStream(torch.device("cuda", device), self, at_once=at_once)

    def ran(self, stream):
        """Something was asked of a stream: run what the schedule wants to run now."""
        if stream.at_once or self.schedule == "eager":
            stream.flush(stream.asked)
        elif self.schedule == "random":
            some = self.draw.choice(self.streams)
            some.flush(some.done + self.draw.randint(0, 3))

    # Memory

    def empty(self, *size, dtype=None, pin_memory=False, device=None, **others):
        """``torch.empty`` whose block belongs to the current stream and is full of rubbish."""
        shape = tuple(size[0]) if size and isinstance(size[0], tuple | list | torch.Size) else size
        n = self.plain_empty(shape, device="meta").numel()
        if others or not n or (device is not None and torch.device(device).type != "cpu"):
            return self.plain_empty(*size, dtype=dtype, device=device, **others)
        dtype = dtype or torch.get_default_dtype()
        block = Block(n * torch.tensor([], dtype=dtype).element_size(), self.current(), pinned=pin_memory)
        tensor = torch.frombuffer(block.memory, dtype=dtype)
        with self.lock:
            self.blocks[tensor.data_ptr()] = block
        if pin_memory:
            self.pinned_bytes.append(len(block.memory))
        weakref.finalize(tensor.untyped_storage(), self.freed, block)
        if not pin_memory:
            self.inherit(block)
        return tensor.view(shape)

    def inherit(self, block):
        """The block's last owner has work on the same stream that is still to come."""
        with self.lock:
            block.writes[block.owner] = block.owner.ask(block.fill)
            self.ran(block.owner)

    def block_of(self, tensor):
        """The block behind a tensor; one made now where the harness has not allocated it."""
        return self.blocks.get(tensor.untyped_storage().data_ptr())

    def device_of(self, tensors):
        """Stands for ``lanes.device_of``: the device on whose stream the block was allocated."""
        blocks = [self.block_of(t) for t in tensors]
        found = [b.owner.device for b in blocks if b is not None and not b.pinned]
        return found[0] if found else self.home[0].device

    def freed(self, block):
        """Nobody holds a block any more: the next owner writes to it on the same stream."""
        if block.pinned:  # torch's own allocator of pinned memory waits for all streams
            return
        with self.lock:
            for stream, number in block.uses.items():
                known = max(block.owner.clock.get(stream, -1), self.host_clock.get(stream, -1))
                if stream is not block.owner and known < number and stream not in block.recorded:
                    self.errors.append("memory was freed on its stream while another still used it")
            if not block.recorded:
                block.owner.do(block.fill)

    def use(self, tensor, stream=None):
        """The step reads a tensor on a stream: what was written there must be known to it."""
        stream, block = stream or self.current(), self.block_of(tensor)
        with self.lock:
            number = stream.ask(lambda: None)
            for other, written in block.writes.items():
                if other is not stream and stream.clock.get(other, -1) < written:
                    self.errors.append("memory was read before it was written")
            block.uses[stream] = number

    def make(self, contents, stream=None):
        """A tensor in a block of its own that a stream of the step fills, late where that stream is late."""
        stream = stream or self.current()
        with self.entered(stream):
            tensor = self.empty(contents.shape, dtype=contents.dtype)
        block = self.block_of(tensor)
        with self.lock:
            memory = torch.frombuffer(block.memory, dtype=contents.dtype).view(contents.shape)
            block.writes[stream] = stream.ask(lambda: self.plain_copy(memory, contents))
            self.ran(stream)
        return tensor

    def copy(self, target, source, non_blocking):
        """Stands for ``Tensor.copy_``: on a lane it is asked for, elsewhere it is done."""
        lane = self.current()
        if lane.at_once or not non_blocking:
            return self.plain_copy(target, source, non_blocking)
        with self.lock:
            number = lane.ask(self.later(target, source))
            for tensor, writes in ((target, True), (source, False)):
                block = self.block_of(tensor)
                if block is not None:
                    self.ordered(lane, block)
                    block.uses[lane] = number
                    if writes:
                        block.writes[lane] = number
            self.ran(lane)
        return target

    def ordered(self, lane, block):
        """What a lane reads or writes over must have been written by streams whose work it knows."""
        for other, written in block.writes.items():
            known = max(lane.clock.get(other, -1), self.host_clock.get(other, -1))
            if other is not lane and known < written and not block.pinned:
                self.errors.append("memory was copied before it was made")

    def later(self, target, source):
        """The copy itself. It holds no tensor: nobody but the program keeps them alive."""
        to, come_from = Place(self, target, "target"), Place(self, source, "source")
        return lambda: self.plain_copy(to.tensor(), come_from.tensor())


class Block:
    """Memory that belongs to a stream."""

    def __init__(self, n_bytes, owner, *, pinned=False):
        self.memory = bytearray([RUBBISH]) * n_bytes
        self.owner, self.pinned = owner, pinned
        self.uses, self.writes, self.recorded = {}, {}, set()

    def fill(self):
        """Write rubbish to it."""
        self.memory[:] = bytes([RUBBISH]) * len(self.memory)


class Place:
    """A flat tensor's bytes, found again when the copy runs."""

    def __init__(self, machine, tensor, role):
        self.machine, self.role = machine, role
        self.begin, self.n = tensor.storage_offset(), tensor.numel()
        self.block = machine.block_of(tensor)
        self.storage = None if self.block is not None else tensor.untyped_storage()

    def tensor(self):
        if self.block is not None:
            return torch.frombuffer(self.block.memory, dtype=torch.uint8)[self.begin : self.begin + self.n]
        if torch._C._storage_Use_Count(self.storage._cdata) <= USES_OF_A_LONE_STORAGE:
            self.machine.errors.append(f"a {self.role} was freed before the copy ran")
        return torch.tensor([], dtype=torch.uint8).set_(self.storage, self.begin, (self.n,))


def _uses_of_a_lone_storage():
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    del tensor
    return torch._C._storage_Use_Count(storage._cdata)


USES_OF_A_LONE_STORAGE = _uses_of_a_lone_storage()


class VirtualStream:
    """Work in order. ``at_once``: what is asked runs before the call returns, as the step's numbers are real."""

    def __init__(self, device, machine, *, at_once=False):
        self.device, self.machine, self.at_once = torch.device(device), machine, at_once
        self.queue, self.asked, self.done = [], 0, 0
        self.clock = defaultdict(lambda: -1)
        machine.streams.append(self)

    def ask(self, work):
        """Put something at the end; returns its number."""
        with self.machine.lock:
            for stream, number in self.machine.host_clock.items():
                self.clock[stream] = max(self.clock[stream], number)
            self.queue.append(work)
            self.asked += 1
            self.clock[self] = self.asked
            return self.asked

    def do(self, work):
        """Something that the step computes on this stream."""
        self.ask(work)
        self.machine.ran(self)

    def flush(self, until):
        with self.machine.lock:
            while self.done < until and self.queue:
                work = self.queue.pop(0)
                self.done += 1
                work()

    def record_event(self):
        event = VirtualEvent(self.machine)
        event.record(self)
        return event

    def wait_event(self, event):
        with self.machine.lock:
            for stream, number in event.clock.items():
                self.clock[stream] = max(self.clock[stream], number)
            self.ask(lambda: event.stream.flush(event.at))
            self.machine.ran(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().synchronize()


class VirtualEvent:
    """A place in a stream, and all that is known to be done before it."""

    def __init__(self, machine):
        self.machine, self.stream, self.at, self.clock = machine, None, 0, {}

    def record(self, stream=None):
        with self.machine.lock:
            self.stream = stream or self.machine.current()
            self.at = self.stream.asked
            self.clock = {**self.stream.clock, self.stream: self.at}

    def synchronize(self):
        with self.machine.lock:
            self.stream.flush(self.at)
            for stream, number in self.clock.items():
                self.machine.host_clock[stream] = max(self.machine.host_clock.get(stream, -1), number)
