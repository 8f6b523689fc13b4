"""Looks at contents in a recorded step: notices those that change while no op writes them, and counts zeros on request.

Kernels that torch does not see (Triton, a C++ extension, NumPy) write past the dispatcher. Each storage is
fingerprinted when its op has run and at each later read of the same contents. Fingerprints and counts stay on the
device until the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.memory.codecs.zvc import n_kept
from ctdr_lightning.memory.traces.facts import may_have_zeros
from ctdr_lightning.memory.traces.trace import WRITTEN_UNSEEN
from ctdr_lightning.memory.values.fingerprint import Fingerprint, differing, has_contents, of_storage

READS_UNSEEN = "reads a tensor that a kernel which torch does not see writes over"


class ContentsWatch:
    """The fingerprints of a step's values, by id."""

    def __init__(self) -> None:
        self._first: dict[int, Fingerprint] = {}
        self._last_look: dict[int, int] = {}
        self._pending: list[tuple[int, int, tuple[Fingerprint, Fingerprint]]] = []
        self._last_intact: dict[int, int] = {}
        self._n_bytes: dict[int, int] = {}
        self._unread: dict[int, int] = {}  # bytes that may still be read through views before the next look

    def look(self, value: int, tensor: Tensor, tick: int) -> None:
        """Note a value's contents at a tick.

        A tensor that is a small part of its storage is looked at each time that as many bytes as the storage has were
        read through such parts: a sequence that is read step by step would else be read as often as it has steps.
        """
        if not has_contents(tensor):
            return
        storage = tensor.untyped_storage()
        n_bytes = storage.nbytes()
        if tensor.nbytes < n_bytes and value in self._first:
            self._unread[value] = left = self._unread.get(value, n_bytes) - tensor.nbytes
            if left > 0:
                return
        self._unread[value] = n_bytes
        self.look_at_storage(value, storage, tick)

    def look_at_storage(self, value: int, storage: torch.UntypedStorage, tick: int) -> None:
        """Note a value's contents where no tensor is at hand."""
        n_bytes = storage.nbytes()
        if self._n_bytes.setdefault(value, n_bytes) == n_bytes:  # FSDP resizes the storages of its weights
            self._note(value, tick, of_storage(storage))

    def _note(self, value: int, tick: int, contents: Fingerprint) -> None:
        if value in self._first:
            self._pending.append((value, self._last_look[value], (self._first[value], contents)))
        else:
            self._first[value] = contents
        self._last_look[value] = tick

    def knows(self, value: int) -> bool:
        """Whether a value was looked at."""
        return value in self._first

    def forget(self, value: int) -> None:
        """A value was written by code outside of the step."""
        self._first.pop(value, None)

    def changed(self) -> dict[int, int]:
        """From each value that changed unseen to the last tick at which it was seen to have its first contents."""
        pending, self._pending = self._pending, []
        for place in differing([pair for _, _, pair in pending]):
            value, last_look, _ = pending[place]
            self._last_intact.setdefault(value, last_look)
        return self._last_intact

    def unseen(self, ops: Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> dict[int, str]:
        """From each value that was written unseen, or read one before it was, to the reason not to make it again.

        Args:
            ops: Tick, inputs and outputs of each op so far.
        """
        last_intact = self.changed()
        found = dict.fromkeys(last_intact, WRITTEN_UNSEEN)
        for tick, inputs, outputs in ops if last_intact else ():
            if any(last_intact.get(v, -1) >= tick for v in inputs):
                found |= {v: READS_UNSEEN for v in outputs if v >= 0 and v not in found}
        return found


class ZeroCounts:
    """The elements that are not zero in saved values that may have many zeros: one reduction a value."""

    def __init__(self) -> None:
        self._may_have: dict[int, torch.dtype] = {}
        self._kept: dict[int, tuple[Tensor, int]] = {}

    def made(self, op: str, inputs: Sequence[int], out: Any, value_of: Callable[[Tensor], int]) -> None:
        """Note an op of the forward that has run.

        Args:
            op: Its full name.
            inputs: Ids of the values it read.
            out: Its result.
            value_of: From a tensor to the id of its value.
        """
        if may_have_zeros(op, of_zeros=any(v in self._may_have for v in inputs[:1])):
            first = out[0] if type(out) in (tuple, list) else out
            if has_contents(first) and first.is_floating_point():
                self._may_have[value_of(first)] = first.dtype

    def look(self, value: int, tensor: Tensor) -> None:
        """Count in a value that autograd saves; twice is once.

        Args:
            value: Its id.
            tensor: The saved tensor, which may be a view of the value.
        """
        dtype = self._may_have.get(value)
        n = tensor.untyped_storage().nbytes() // dtype.itemsize if dtype is not None else 0
        if not n or value in self._kept:
            return
        with no_dispatch_modes(), torch.no_grad():
            flat = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), 0, (n,), (1,))
            self._kept[value] = n_kept(flat), n

    def shares(self) -> dict[int, float]:
        """The share of zeros by value id; one synchronisation for all that are on a GPU."""
        if not self._kept:
            return {}
        counts, sizes = zip(*self._kept.values(), strict=True)
        with no_dispatch_modes(), torch.no_grad():
            kept = torch.stack([count.to(counts[-1].device) for count in counts]).tolist()
        return {value: 1 - left / n for value, left, n in zip(self._kept, kept, sizes, strict=True)}
