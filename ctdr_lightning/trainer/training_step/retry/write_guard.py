"""Watches a step that is run again: a write to an object that was not restored ends it before the write is made.

Versions do not show writes through ``.data``, nor writes to tensors that no attribute holds. But the second attempt
does the same as the first, so every write of the first is seen in the second.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpOverload, TorchDispatchMode, pop_dispatch_mode, push_dispatch_mode
from ctdr_lightning.memory.values.op_traits import overwritten
from ctdr_lightning.memory.values.tensors import storage_of, tensors_in


class CannotRepeatError(RuntimeError):
    """The second try is about to do something that the first may have done already."""


class _Known(weakref.ref):
    """A weak reference to a storage, and whether it may be written."""

    __slots__ = ("key", "own")
    key: int
    own: bool


class WriteGuard(TorchDispatchMode):
    """Refuses writes to storages that were there before the try, other than those that were put back.

    Args:
        restored: Tensors that were put back.
        generators: Generators that were put back.

    Attributes:
        watching: Set to False when the second attempt passes the point that the first is known not to have passed.
    """

    def __init__(self, restored: Iterable[Tensor], generators: Iterable[Any]) -> None:
        super().__init__()
        self.watching = True
        self._known: dict[int, _Known] = {}
        drawn: list[Any] = [g for g in (torch.default_generator, *generators) if isinstance(g, torch.Generator)]
        # the dispatcher wraps a generator anew for each call: only the wrapped one is the same
        self._generators = {g._cdata for g in drawn}
        self._note(restored, own=True)

    def _note(self, tensors: Iterable[Tensor], *, own: bool) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self._known:
                self._known[storage._cdata] = ref = _Known(storage, self._forget)
                ref.key, ref.own = storage._cdata, own

    def _forget(self, ref: _Known) -> None:
        if self._known.get(ref.key) is ref:
            del self._known[ref.key]

    def __enter__(self) -> WriteGuard:
        push_dispatch_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the stack, from below a recorder that stays for the backward where there is one."""
        above = []
        while (mode := pop_dispatch_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            push_dispatch_mode(mode)
        self._known.clear()  # the references' callbacks hold the guard in a cycle

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        self._note(tensors_in((*args, *given.values())), own=False)
        for tensor in overwritten(func, args, given):
            storage = storage_of(tensor)
            if self.watching and storage is not None and not self._known[storage._cdata].own:
                raise CannotRepeatError(
                    f"a tensor of shape {tuple(tensor.shape)} from before the step, which {func} writes unseen"
                )
        generator = given.get("generator")
        if self.watching and generator is not None and generator._cdata not in self._generators:
            raise CannotRepeatError(f"a generator that {func} draws from and that no attribute of the module holds")
        out = func(*args, **given)
        self._note(tensors_in(out if isinstance(out, tuple | list) else (out,)), own=True)
        return out
