"""The tape's graph at run time: values that are held or can be made again, owned by reference counting alone.

A :class:`Value` is a thunk: it holds its tensor, or the :class:`Node` (an op call) that can make it again. Handles,
which autograd owns, own values; nodes own the values they read. When autograd frees a graph node the handle dies, then
the value, then every source that nobody else needs. Nothing is freed by hand and there are no cycles, so the garbage
collector is never needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.values.generators import Draw
from ctdr_lightning.memory.values.tensors import alias_of, version_of, wants_grad_itself

_NO_KWARGS: dict[str, Any] = {}
EXACT, SIGNS, ABOUT = "exact", "signs", "about"
MemoryLayout = tuple[tuple[int, ...], torch.dtype]


class Elsewhere(Protocol):
    """Contents that wait in another place, or here in fewer bytes."""

    def gone(self) -> None:
        """Wait until the tensor that they came from may be freed or written over."""
        ...

    def start(self) -> None:
        """Start to bring them back."""
        ...

    def fetch(self) -> Tensor:
        """Bring them back, with the shape, strides and dtype that they had."""
        ...


class TensorRef(weakref.ref):
    """A weak reference to a tensor that knows its key in the table."""

    __slots__ = ("key",)
    key: int


class Value:
    """A tensor at one version of its storage.

    Attributes:
        tensor: The tensor where it is held, else None.
        program_tensor: A weak reference to the tensor that the program itself made, which may be alive.
        storage_ref: A weak reference to the storage that ``program_tensor`` had; ``x.data = y`` gives it another.
        version: In-place version at which the contents are this value.
        saved_alias: The program's tensor and the version that autograd saved, where its storage was written meanwhile.
        node: The op call that makes the value again; None where the value can only be held.
        layout: Strides and dtype that the program's tensor has, where a replay's need not have them.
        leaf_data: The contents of a leaf that is held as itself, in case that ``x.data = y`` gives it others.
        stays_while_awaited: Whether a replay leaves the value held for those who still await it.
        hold: Whether a replay leaves the value held although autograd does not await it.
        handles: How many live handles await the value.
        away: The contents where they wait elsewhere, or here in fewer bytes; a value with them has no node.
        leaves: Whether it is to be put away, at once or later: its views are made of it again, rather than held.
        comes_back: The part of its contents that a codec restores: all, the signs, or an approximation.
        identity: Its id in the trace, if known; in a step that is being recorded, its op's tick.
        contents: Fingerprint of the saved tensor, with its shape; None if it is not verified.
        remade: Whether the tensor that is held was made again, or came back, and was not verified since.
    """

    __slots__ = (
        "__weakref__", "away", "comes_back", "contents", "eviction", "handles", "hold", "identity", "layout",
        "leaf_data", "leaves", "node", "program_tensor", "remade", "saved_alias", "stays_while_awaited", "storage_ref",
        "tensor", "version",
    )  # fmt: skip

    def __init__(self, node: Node | None = None) -> None:
        self.node = node
        self.layout: MemoryLayout | None = None
        self.leaf_data: Tensor | None = None
        self.tensor: Tensor | None = None
        self.program_tensor: TensorRef | None = None
        self.storage_ref: weakref.ref[torch.UntypedStorage] | None = None
        self.version = 0
        self.saved_alias: tuple[Tensor, int] | None = None
        self.stays_while_awaited = True
        self.hold = False
        self.handles = 0
        self.eviction: Any = None
        self.away: Elsewhere | None = None
        self.leaves = False
        self.comes_back = EXACT
        self.identity = -1
        self.contents: Any = None
        self.remade = False

    @classmethod
    def holding(cls, tensor: Tensor) -> Value:
        """A value that holds a tensor whose producer is not known."""
        value = cls()
        value.tensor = tensor if wants_grad_itself(tensor) else alias_of(tensor)
        value.version = version_of(tensor)
        return value

    def get(self) -> Tensor | None:
        """The tensor, if it is held or still alive and was not written in place since."""
        tensor = self.tensor if self.tensor is not None else self.live()
        if tensor is None or version_of(tensor) != self.version:
            return None
        if self.leaf_data is not None and tensor.untyped_storage() is not self.leaf_data.untyped_storage():
            return self.leaf_data
        return tensor

    def live(self) -> Tensor | None:
        """The tensor that the program itself made, while it is alive and has its storage."""
        tensor = self.program_tensor() if self.program_tensor is not None else None
        if tensor is None or self.storage_ref is None or self.storage_ref() is not tensor.untyped_storage():
            return None
        return tensor

    def storage(self) -> torch.UntypedStorage | None:
        """The storage of the contents, if they are in memory."""
        if self.leaf_data is not None:
            return self.leaf_data.untyped_storage()
        tensor = self.tensor if self.tensor is not None else self.live()
        return None if tensor is None else tensor.untyped_storage()

    def saved(self) -> Tensor | None:
        """The tensor that autograd would read although the program wrote over it unnoticed (through ``.data``)."""
        if self.saved_alias is None or version_of(self.saved_alias[0]) != self.saved_alias[1]:
            return None
        return self.saved_alias[0]

    def keep(self, tensor: Tensor) -> None:
        """Hold a tensor: made again, or an alias of the program's own."""
        self.tensor = tensor
        self.version = version_of(tensor)
        self.leaf_data = None

    def keep_leaf(self, leaf: Tensor) -> None:
        """Hold a leaf as itself: cheaper than an alias, and some kernels are chosen by whether it requires grad."""
        self.tensor = leaf
        self.version = leaf._version
        self.leaf_data = leaf.data

    def sever(self, storage: torch.UntypedStorage) -> None:
        """The storage is about to be written: its contents will no longer be this value."""
        tensor = self.live() if self.tensor is None else self.tensor
        self.program_tensor = None
        if tensor is None or tensor.untyped_storage() is not storage:
            return
        if self.handles and self.saved_alias is None:
            self.saved_alias = (alias_of(tensor), self.version)
        if self.away is not None:
            self.away.gone()  # it is still being sent from there
        if self.node is not None or self.away is not None:
            self.tensor = None

    def bring_back(self) -> Tensor:
        """The tensor of a value that is away; it is held from now on."""
        assert self.away is not None, "the value is not away"
        tensor = self.away.fetch()
        self.keep(tensor)
        self.away, self.remade = None, True
        return tensor


def root_of(value: Value) -> Value:
    """The value that a chain of views starts from; the value itself where it is no view of another."""
    while value.node is not None and value.node.view and type(value.node.args[0]) is Value:
        value = value.node.args[0]
    return value


class Node:
    """One op call: its function, its arguments with values in the place of tensors, weak references to its outputs."""

    __slots__ = (
        "__weakref__", "args", "draw", "func", "grad", "index", "kwargs", "outs", "seconds", "unit", "view", "written",
    )  # fmt: skip

    def __init__(
        self, func: OpOverload | Callable[..., Tensor], index: float, unit: int = 0, view: bool = False
    ) -> None:
        self.func = func
        self.view = view
        self.written = False
        self.index = index
        self.unit = unit
        self.grad = torch.is_grad_enabled()  # some kernels look at it
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = _NO_KWARGS
        self.outs: list[weakref.ref[Value] | None] = []
        self.seconds = 0.0
        self.draw: Draw | None = None  # of a call that draws random numbers

    def place_of(self, value: Value) -> int:
        """Which of the call's outputs a value is."""
        return next((place for place, ref in enumerate(self.outs) if ref is not None and ref() is value), 0)

    def sources(self) -> list[Value]:
        """The values that the call reads."""
        found: list[Value] = []
        for arg in (*self.args, *self.kwargs.values()) if self.kwargs else self.args:
            if type(arg) is Value:
                found.append(arg)
            elif type(arg) is list:
                found += [a for a in arg if type(a) is Value]
        return found


class Handle:
    """Autograd's placeholder for a saved tensor. It may be unpacked any number of times."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        value.handles += 1

    def __del__(self) -> None:
        self.value.handles -= 1


class SignHandle(Handle):
    """A handle on a value that comes back as signs, for autograd nodes that read no more than that."""

    __slots__ = ()


class Held:
    """A handle that holds its tensor itself, because nothing could make it again, or nothing need."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if wants_grad_itself(tensor) else alias_of(tensor)
        self.version = version_of(tensor)

    def get(self) -> Tensor | None:
        """The tensor, if it was not written in place since."""
        return self.tensor if version_of(self.tensor) == self.version else None
