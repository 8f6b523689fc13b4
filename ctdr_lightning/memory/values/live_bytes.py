"""Live bytes, counted where no allocator tells: every storage that an op made, until it dies."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpMode, OpOverload
from ctdr_lightning.memory.values.gathered import GatheredStorages
from ctdr_lightning.memory.values.higher_order import HigherOrderUnseen
from ctdr_lightning.memory.values.sharded import on_shards
from ctdr_lightning.memory.values.tensors import own_part, storage_of

_trackers: list[LiveBytes] = []


def active_trackers() -> tuple[LiveBytes, ...]:
    """The trackers that are entered now: none, once a step is over."""
    return tuple(_trackers)


def tell_trackers(tensors: Iterable[Any]) -> None:
    """Tell every active tracker of tensors that were made where no dispatch mode sees them."""
    if _trackers:
        for tracker in _trackers:
            tracker.track(tensors)


class _Storage(weakref.ref):
    """A weak reference to a counted storage."""

    __slots__ = ("key", "n_bytes")
    key: int
    n_bytes: int


class LiveBytes:
    """Counts the bytes of the storages it is shown, until they die; of sharded tensors, those of the own shard.

    While entered it also sees the outputs of replays.

    Attributes:
        peak: The largest ``now`` so far.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._counted_bytes = 0
        self._known: dict[int, _Storage] = {}
        self._dead: deque[_Storage] = deque()
        self._gathered = GatheredStorages()

    @property
    def now(self) -> int:
        """Live bytes at present."""
        self._forget_dead()
        self._forget_emptied()
        return self._counted_bytes

    def _forget_dead(self) -> None:
        while self._dead:
            ref = self._dead.popleft()
            self._counted_bytes -= ref.n_bytes
            del self._known[ref.key]

    def _forget_emptied(self) -> None:
        for key in self._gathered.emptied():
            self._resize(key, 0)

    def _resize(self, key: int, n_bytes: int) -> None:
        ref = self._known[key]
        self._counted_bytes += n_bytes - ref.n_bytes
        ref.n_bytes = n_bytes
        self.peak = max(self.peak, self._counted_bytes)

    def note_gather(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count weights that a call has gathered, until FSDP empties their storages; any other call is ignored."""
        for key, storage in self._gathered.filled(func, args, kwargs).items():
            if key not in self._known:
                self._watch(storage, 0)
            self._resize(key, storage.nbytes())

    def track(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors that are not counted yet."""
        self._forget_emptied()
        for tensor in tensors:
            storage = storage_of(own_part(tensor)) if isinstance(tensor, Tensor) else None
            self._forget_dead()  # first, because a new storage may have a dead one's address
            if storage is not None and storage._cdata not in self._known:
                n_bytes = storage.nbytes()
                self._watch(storage, n_bytes)
                self._counted_bytes += n_bytes
                self.peak = max(self.peak, self._counted_bytes)

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Never count these tensors' storages: they are from before the step."""
        for tensor in tensors:
            storage = storage_of(own_part(tensor)) if isinstance(tensor, Tensor) else None
            self._forget_dead()
            if storage is not None and storage._cdata not in self._known:
                self._watch(storage, 0)

    def _watch(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        key = storage._cdata
        # The callback has no line of Python: a Ctrl-C that comes while a weak reference calls would be swallowed.
        self._known[key] = ref = _Storage(storage, self._dead.append)
        ref.key, ref.n_bytes = key, n_bytes

    def __enter__(self) -> LiveBytes:
        _trackers.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _trackers.remove(self)


class PeakMeter(OpMode):
    """Measures the true peak of the code inside it, on a device whose allocator keeps no count.

    Forward, backward and replays are all seen. Storages from before the block are not counted.

    Attributes:
        live: The counter; ``live.peak`` is the peak in bytes.
    """

    # torch refuses a higher-order operator (`torch.cond`, flex_attention) under a mode that does not say it takes them.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()
        self._unseen = HigherOrderUnseen()

    def __enter__(self) -> PeakMeter:
        self.live.__enter__()
        self._unseen.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        self._unseen.__exit__(kind, error, tb)
        self.live.__exit__(kind, error, tb)

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is measured."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and on_shards(types):
            return NotImplemented
        for arg in (*args, *kwargs.values()) if kwargs else args:
            self.live.ignore(arg if type(arg) in (tuple, list) else (arg,))
        out = self.call(func, args, kwargs or {})
        self.live.track(out if type(out) in (tuple, list) else (out,))
        self.live.note_gather(func, args, kwargs or {})
        return out
