"""The log of a step while it runs: from dispatched calls and object deaths to a :class:`Trace`.

Every lifetime is observed, never guessed: a storage's frame end is the death of its last tensor object (handles hold
detached aliases, so autograd's hold is not mixed in), a release is the death of the handle.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import OutOfMemoryError, Tensor
from torch.nn import Parameter

from ctdr_lightning.basics.torch_private import FakeTensor, OpOverload
from ctdr_lightning.memory.recorder.contents import ContentsWatch
from ctdr_lightning.memory.recorder.logged_storages import LoggedStorage, UnseenLives, records_of, wait_for_threads
from ctdr_lightning.memory.traces.overwrites import pin_what_cannot_wait
from ctdr_lightning.memory.traces.trace import WEIGHT, OpRecord, Save, Trace, ValueRecord
from ctdr_lightning.memory.values.op_traits import (
    overwritten,
    pin_reason_of_replay,
    pin_reason_on_gpu,
    traits,
    without_running_stats,
)
from ctdr_lightning.memory.values.tensors import has_storage, own_part, storage_of, tensors_in
from ctdr_lightning.memory.values.value import Handle, Value

_PLAIN = (Tensor, Parameter, FakeTensor)


class _Saved:
    __slots__ = ("packed", "readers", "released", "unpacked", "value")

    def __init__(self, value: int, packed: int) -> None:
        self.value, self.packed = value, packed
        self.unpacked: list[int] = []
        self.readers: list[str] = []
        self.released: int | None = None


class _Watch(weakref.ref):
    """A weak reference to a tensor or a storage, with the entry that dies with it."""

    __slots__ = ("key", "storage")
    key: int
    storage: LoggedStorage


class LoggedHandle(Handle):
    """A handle whose death is logged."""

    __slots__ = ("log", "saved")

    def __init__(self, value: Value, saved: _Saved, log: StepLog) -> None:
        super().__init__(value)
        self.saved, self.log = saved, log

    def __del__(self) -> None:
        self.saved.released = self.log.tick
        super().__del__()


class StepLog:
    """Collects the ops, saves and releases of a step.

    Attributes:
        tick: The present time.
        live_bytes: Bytes that the step has allocated and not freed.
        unit: The FSDP unit whose forward runs; 0 outside of one.
        module: Path of the module whose forward runs.
        region: How many forwards of modules have begun; -1 where that is not known.
        backward: Whether the step is in its backward.
        n_training: How many forwards of modules in training mode had begun before the last op of the forward.
    """

    def __init__(self) -> None:
        self.tick = self.n_training = -1
        self.unit = 0
        self.module, self.region, self.backward = "", -1, False
        self.live_bytes = 0
        self._ops: list[tuple[Any, ...]] = []
        self._storages: list[LoggedStorage] = []
        self._by_data: dict[int, LoggedStorage] = {}
        self._tensors: dict[int, _Watch] = {}
        self._replayed: dict[int, _Watch] = {}
        self._on_death, self._on_free, self._on_replay_free = self._tensor_died, self._storage_died, self._replay_freed
        self._values: list[tuple[int, int, tuple[int, ...], str, str]] = []
        self._units: dict[int, int] = {}
        self._overwritten_at: dict[int, int] = {}
        self._saves: list[_Saved] = []
        self._strided = True
        self._sharded = False
        self._contents = ContentsWatch()
        self._lives = UnseenLives(self._by_data)

    def reads(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Ids of the values that a call is about to read."""
        self._lives.look(self.tick - 1)
        if traits(func).batch_norm:
            args = without_running_stats(func, args, kwargs)
        if kwargs:
            args = (*args, *kwargs.values())
        tensors = list(tensors_in(args))
        strided = [t for t in tensors if has_storage(t)]
        self._strided = len(strided) == len(tensors)
        values = [self.value_of(tensor) for tensor in strided]
        if not (self.backward or traits(func).view):
            for value, tensor in zip(values, strided, strict=True):
                if not self._storage_of(tensor, born=-1).is_filled_again:
                    self._contents.look(value, tensor, self.tick)
        return tuple(dict.fromkeys(values))

    def ran(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[int, ...],
        out: Any,
        seconds: float,
        temp_bytes: int,
        pin: str = "",
        rest_pin: str = "",
    ) -> None:
        """Enter a call that has run; ``pin``: why it may not run again, ``rest_pin``: why later outputs stay."""
        op, backward = traits(func), self.backward
        if op.special:
            pin = pin or pin_reason_of_replay(func, args, kwargs)
        outs, strided = _stored(out)
        if not (strided and self._strided):
            pin = pin or "a layout without a storage"
        if self.unit:
            self._sharded = True
        if self._sharded and not backward:
            self._pin_foreign(inputs)
        for tensor in overwritten(func, args, kwargs) if op.writes else ():
            if has_storage(tensor) and not self._storage_of(tensor, born=-1).is_filled_again:
                self._overwrite(tensor, pin or ("" if tensor is outs[0] else "written as a side effect"))
        pins = [pin, *[pin or rest_pin] * len(outs)]
        if not backward and any(o is not None and o.device.type == "cuda" for o in outs):
            on_gpu = [pin_reason_on_gpu(func, args, o) if o is not None else "" for o in outs]
            pins = [p or reason for p, reason in zip(pins, on_gpu, strict=False)]
        outputs = tuple([self._made(o, p, backward) for o, p in zip(outs, pins, strict=False)])
        if not backward:
            for made, value in zip(outs, outputs, strict=True):
                self._look_at_result(made, value)
        place = (self.module, backward, pin, self.region)
        self._ops.append((op.name, self.tick, inputs, outputs, seconds, temp_bytes, *place))
        self._lives.ran(func, args, kwargs, self.tick)

    def _look_at_result(self, tensor: Tensor | None, value: int) -> None:
        if tensor is not None and self._values[value][1] == len(self._ops) and not self._values[value][4]:
            self._contents.look(value, tensor, self.tick)

    def wrote_beside(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call outside of the step, such as an optimizer's update, has written to its arguments."""
        for tensor in overwritten(func, args, kwargs):
            storage = storage_of(tensor)
            known = self._by_data.get(storage._cdata) if storage is not None else None
            if known is not None:  # tensors that the step has not touched are not its own
                self._contents.forget(known.value)

    def saved(self, value: Value, tensor: Tensor) -> LoggedHandle:
        """Autograd saves a tensor: the handle to give it."""
        record = _Saved(self.value_of(tensor) if has_storage(tensor) else -1, self.tick)
        if record.value >= 0:
            self._pin_foreign((record.value,))
            self._saves.append(record)
            self._contents.look(record.value, tensor, self.tick)
        return LoggedHandle(value, record, self)

    def unpacks(self, handle: LoggedHandle, reader: str) -> None:
        """Autograd asks for a saved value: a tick of its own.

        Args:
            handle: The handle that autograd holds.
            reader: Torch's own autograd node that asks; empty if anybody else asks.
        """
        self._lives.look(self.tick)
        self.tick += 1
        handle.saved.unpacked.append(self.tick)
        handle.saved.readers.append(reader)

    def returned(self, handle: LoggedHandle, tensor: Tensor) -> None:
        """A saved value came back, perhaps in another storage than it left in: its readers read the same value."""
        data = storage_of(tensor)
        if data is not None and data._cdata not in self._replayed:
            known = self._by_data.get(data._cdata)
            if known is not None and known.value == handle.saved.value:
                self._contents.look(known.value, tensor, self.tick)
        if data is not None and data._cdata not in self._by_data:
            original = self._storages[self._values[handle.saved.value][0]]
            self._by_data[data._cdata] = original
            self._replayed[data._cdata] = ref = _Watch(data, self._on_replay_free)
            ref.key, ref.storage = data._cdata, original

    def _replay_freed(self, ref: _Watch) -> None:
        self._replayed.pop(ref.key, None)
        self._by_data.pop(ref.key, None)

    @property
    def n_ops(self) -> int:
        """Number of ops so far."""
        return len(self._ops)

    def value_of(self, tensor: Tensor) -> int:
        """Id of the contents that a tensor's storage has now."""
        storage = self._storage_of(tensor, born=-1)
        if storage.value >= 0:
            return storage.value
        weight = isinstance(tensor, Parameter) and tensor.requires_grad
        return self._new_value(storage, tensor, -1, WEIGHT if weight else "")

    def _new_value(self, storage: LoggedStorage, tensor: Tensor, op: int, pin: str) -> int:
        storage.value = len(self._values)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._values.append((storage.index, op, tuple(map(int, tensor.shape)), dtype, pin))
        if op >= 0:
            self._units[storage.value] = self.unit
        return storage.value

    def _pin_foreign(self, values: Iterable[int]) -> None:
        """A unit's weights are gone outside of its own forward and backward, so values crossing its border stay."""
        for value in values:
            if self._units.get(value, self.unit) != self.unit:
                storage, op, shape, dtype, pin = self._values[value]
                self._values[value] = (storage, op, shape, dtype, pin or "crosses an FSDP unit")

    def _storage_of(self, tensor: Tensor, born: int) -> LoggedStorage:
        data = own_part(tensor).untyped_storage()
        found = self._by_data.get(data._cdata)
        if found is not None:
            found.seen = self.tick
            return found
        storage = LoggedStorage(len(self._storages), data.nbytes(), born, self._lives.collective)
        self._storages.append(storage)
        self._by_data[data._cdata] = storage
        if born >= 0:
            self.live_bytes += storage.n_bytes
        storage.ref = ref = _Watch(data, self._on_free)
        ref.key, ref.storage = data._cdata, storage
        return storage

    def _storage_died(self, ref: _Watch) -> None:
        key, storage = ref.key, ref.storage
        if storage.born >= 0:
            self.live_bytes -= storage.n_bytes
        self._lives.died(storage, self.tick)
        if self._by_data.get(key) is storage:
            del self._by_data[key]

    def _made(self, tensor: Tensor | None, pin: str, backward: bool) -> int:
        if tensor is None:
            return -1
        storage = self._storage_of(tensor, born=self.tick)
        if storage.born == self.tick:
            storage.backward = backward
        if storage.backward or not backward:  # the backward's views of an unpacked value are no hold of the program's
            self._watch(tensor, storage)
        return storage.value if storage.value >= 0 else self._new_value(storage, tensor, len(self._ops), pin)

    def _overwrite(self, tensor: Tensor, pin: str) -> None:
        storage = self._storage_of(tensor, born=-1)
        old = self.value_of(tensor)
        self._overwritten_at[old] = self.tick
        if tensor.nbytes != storage.n_bytes:
            pin = pin or "written in place through a view"
        elif self._values[old][1] < 0 and storage.born < 0:
            pin = pin or "written over a tensor from before the step"
        elif self._values[old][4]:
            pin = pin or f"written over a pinned value ({self._values[old][4]})"
        self._new_value(storage, tensor, len(self._ops), pin)

    def _watch(self, tensor: Tensor, storage: LoggedStorage) -> None:
        key = id(tensor)
        known = self._tensors.get(key)
        if known is None or known() is not tensor:
            storage.live += 1
            self._tensors[key] = ref = _Watch(tensor, self._on_death)
            ref.key, ref.storage = key, storage

    def _tensor_died(self, ref: _Watch) -> None:
        ref.storage.live -= 1
        ref.storage.end = self._lives.let_go(ref.storage, self.tick)
        if self._tensors.get(ref.key) is ref:
            del self._tensors[ref.key]

    def last_look(self) -> None:
        """The step is over: look once more at the tensors still in memory."""
        for storage in set(self._by_data.values()):
            data = storage.ref() if storage.ref is not None else None
            if data is not None and self._contents.knows(storage.value):
                self._contents.look_at_storage(storage.value, data, self.tick)

    def unread_bytes(self, standing: Iterable[Tensor]) -> int:
        """Bytes of tensors from before the step that it has not touched: they are in memory all the same.

        Args:
            standing: The tensors; of subclasses (shards, quantized weights) nothing is known.
        """
        plain = (t.untyped_storage() for t in standing if type(t) in _PLAIN and has_storage(t))
        return sum({s._cdata: s.nbytes() for s in plain if s._cdata not in self._by_data}.values())

    def forget_regions(self) -> None:
        """Which module ran cannot be told, as some are compiled."""
        self._ops = [(*op[:-1], -1) for op in self._ops]
        self.n_training = -1

    def close(self) -> None:
        """Stop watching: without this the watchers would wait for the garbage collector."""
        self._tensors.clear()
        self._by_data.clear()
        self._replayed.clear()
        del self._on_death, self._on_free, self._on_replay_free  # bound methods: they would keep the log in a cycle
        for storage in self._storages:
            storage.ref = None

    def finish(self, device: str, meta: dict[str, str], *, evicting: bool = False) -> Trace:
        """The trace of everything logged so far.

        Args:
            device: Device type on which the step ran.
            meta: Anything worth keeping with the trace.
            evicting: Whether an online policy ran: its captured calls hold tensors too, which no step does.
        """
        n_ticks = self.tick + 1
        self._pin_written_unseen()
        saves: dict[int, list[Save]] = {}
        for s in self._saves:
            released = n_ticks - 1 if s.released is None else s.released
            saves.setdefault(s.value, []).append(Save(s.packed, tuple(s.unpacked), released, tuple(s.readers)))
        held: dict[int, int] = {}
        for identity, entries in saves.items():
            storage = self._values[identity][0]
            held[storage] = max(held.get(storage, -1), max(s.released for s in entries))
        self._lives.look(self.tick)
        wait_for_threads(self._storages)
        if evicting:
            held = dict.fromkeys(range(len(self._storages)), n_ticks - 1)  # what outlives the step is its own
        storages = records_of(self._storages, held, n_ticks)
        values = tuple(
            ValueRecord(storage, op, shape, dtype, self._overwritten_at.get(i, n_ticks), tuple(saves.get(i, ())), pin)
            for i, (storage, op, shape, dtype, pin) in enumerate(self._values)
        )
        resident = sum(s.resident_bytes for s in self._storages)
        self.close()
        ops = tuple(OpRecord(*op) for op in self._ops)
        trace = Trace(ops, values, storages, n_ticks, device, resident, meta, self.n_training)
        return pin_what_cannot_wait(trace)

    def unrepeatable(self) -> frozenset[int]:
        """Ticks of the ops that may not run again, because of writes by unseen kernels so far."""
        makers = [self._values[v][1] for v in self._contents.unseen((op[1], op[2], op[3]) for op in self._ops)]
        return frozenset(self._ops[op][1] for op in makers if op >= 0)

    def first_of(self, ticks: set[int]) -> set[int]:
        """Ticks of those ops among some that read nothing which follows from another of them."""
        found, follows = set[int](), set[int]()
        for op in self._ops:
            tick, inputs, outputs = op[1:4]
            behind = not follows.isdisjoint(inputs)
            if tick in ticks and not behind:
                found.add(tick)
            if behind or tick in ticks:
                follows.update(v for v in outputs if v >= 0)
        return found

    def op_at(self, tick: int) -> tuple[str, str]:
        """Name and module of the op that ran at a tick."""
        return next(((op[0], op[6]) for op in self._ops if op[1] == tick), ("an operation", ""))

    def writes_unseen(self) -> bool:
        """Whether a kernel that torch does not see has written to a tensor from before the step, or may have."""
        try:
            self.last_look()  # writes to tensors without a later reader show here alone
        except OutOfMemoryError:
            return True
        return any(self._values[v][1] < 0 for v in self._contents.changed())

    def _pin_written_unseen(self) -> None:
        for value, reason in self._contents.unseen((op[1], op[2], op[3]) for op in self._ops).items():
            storage, op, shape, dtype, pin = self._values[value]
            self._values[value] = (storage, op, shape, dtype, pin or reason)


def _stored(out: Any) -> tuple[list[Tensor | None], bool]:
    """A call's results, None for those without a storage, and whether every tensor among them has one."""
    found: list[Tensor | None] = []
    strided = True
    for each in out if type(out) in (tuple, list) else (out,):
        is_tensor = isinstance(each, Tensor)
        stored = is_tensor and has_storage(each)
        strided = strided and stored is is_tensor
        found.append(each if stored else None)
    return found, strided
