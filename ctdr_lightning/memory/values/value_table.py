"""From the live tensors of a forward to their values, and the effect of writes in place on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ctdr_lightning.basics.torch_private import NoTorchDispatch, OpOverload
from ctdr_lightning.memory.values.gathered import GatheredStorages
from ctdr_lightning.memory.values.generators import Draw
from ctdr_lightning.memory.values.live_bytes import tell_trackers
from ctdr_lightning.memory.values.op_traits import (
    COLLECTIVE,
    overwritten,
    pin_reason_of_call,
    pin_reason_of_replay,
    traits,
    without_running_stats,
)
from ctdr_lightning.memory.values.tensors import alias_of, storage_of, version_of, wants_grad_itself
from ctdr_lightning.memory.values.value import Node, TensorRef, Value

_SEQUENCES = (list, tuple)


def _forgetter(values: dict[int, Value]) -> Callable[[TensorRef], None]:
    """A callback that drops a dead tensor's entry; it knows the dictionary alone, so that the table is in no cycle."""

    def forget(ref: TensorRef) -> None:
        value = values.get(ref.key)
        if value is not None and value.program_tensor is ref:
            del values[ref.key]

    return forget


class ValueTable:
    """From live tensors to their values, for one forward.

    Entries vanish with their tensors, so the table never prolongs a value's life.

    Attributes:
        unit: The FSDP unit whose forward runs; 0 outside of one.
    """

    def __init__(self) -> None:
        self.unit = 0
        self._last = -1  # index of the last captured call
        self._values: dict[int, Value] = {}
        self._unfiled: list[weakref.ref[Value]] = []
        self._leaves: list[Value] = []  # of values whose tensors live as long as the model
        # Storages on which there is a value. A dead one's place is soon another's: a mask of dropout is written there.
        self._read: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gathers = GatheredStorages()
        self._gathered: set[int] = set()  # storages of weights that an FSDP unit read
        self._files: dict[int, tuple[weakref.ref[torch.UntypedStorage] | None, list[weakref.ref[Value]]]] = {}
        self._on_death = _forgetter(self._values)

    def __len__(self) -> int:
        """Number of live tensors that have a value."""
        return len(self._values)

    def find(self, tensor: Tensor) -> Value | None:
        """The value of a live tensor at its present version, if an op call that can be replayed made it.

        A value of another FSDP unit is held from here on: that unit's weights will be gone when it is needed.
        """
        value = self._values.get(id(tensor))
        if value is None or value.storage_ref is None or value.storage_ref() is not tensor.untyped_storage():
            return None
        try:  # `version_of` in place: this runs four times an op
            version = tensor._version
        except RuntimeError:
            version = -1
        if value.version != version:
            return None
        if value.node is not None and value.node.unit != self.unit:
            self.hold(value)
        return value

    def known(self, tensor: Tensor) -> Value | None:
        """The value of a live tensor, as ``find`` gives it, or that of a view whose own op nobody saw."""
        value = self.find(tensor)
        if value is None:
            base = tensor._base
            return None if base is None else self._find_view(tensor, base)
        return value

    def _find_view(self, tensor: Tensor, base: Tensor) -> Value | None:
        """The value of a view of a tensor that can be made again, by its geometry."""
        whole = self.find(base)
        if whole is None or (whole.node is None and not whole.leaves) or not _is_part(tensor, base):
            return None
        node = Node(view_again, self._last + 0.5, self.unit, view=True)  # after its base, before its readers
        start = tensor.storage_offset() - base.storage_offset()
        node.args = (whole, tuple(tensor.shape), tensor.stride(), start)
        value = self._enter(node, tensor)
        if value is not None:
            value.stays_while_awaited, value.hold = whole.stays_while_awaited, whole.hold
        return value

    def hold(self, value: Value) -> None:
        """Hold a live value from now on and release its sources."""
        tensor = value.live()
        assert tensor is not None, "the program's own tensor is gone"
        value.keep(alias_of(tensor))
        value.node = None
        self._unfiled.append(weakref.ref(value))

    def capture(self, func: OpOverload, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
        """Make the node of a call that is about to run, or None where the call may not be replayed."""
        op = traits(func)
        if op.special:
            if op.batch_norm:
                args = without_running_stats(func, args, kwargs)
            elif pin_reason_of_replay(func, args, kwargs) or (op.written and not self._can_make_again(args[0])):
                return None
        node = Node(func, index, self.unit, op.view)
        node.written = bool(op.written)
        if op.draws and pin_reason_of_call(func, args, kwargs):
            node.draw = Draw(args[0].device)
        source, sources = self._source, self._sources
        try:
            node.args = tuple(
                [source(a) if isinstance(a, Tensor) else sources(a) if type(a) in _SEQUENCES else a for a in args]
            )
            if kwargs:
                node.kwargs = {k: sources(a) for k, a in kwargs.items()}
        except NotImplementedError:  # a layout without a storage, such as sparse: writes to it could not be noticed
            return None
        self._last = index
        return node

    def shield(self, node: Node, most_bytes: int) -> bool:
        """Copy a call's inputs that the program may overwrite while no op is seen.

        Args:
            node: A captured call.
            most_bytes: Size of the largest tensor to copy.

        Returns:
            Whether everything of the kind was small enough.
        """
        small = True
        for value in node.sources():
            tensor = value.tensor
            if value.node is None and value.leaf_data is None and tensor is not None and not tensor.requires_grad:
                if tensor.nbytes <= most_bytes:
                    value.keep(_copy_of(tensor))
                    tell_trackers((value.tensor,))
                else:
                    small = False
        return small

    def _can_make_again(self, arg: Any) -> bool:
        value = self.known(arg) if isinstance(arg, Tensor) else None
        return value is not None and value.node is not None

    def _source(self, tensor: Tensor) -> Value:
        return self.known(tensor) or self._holding(tensor)

    def _sources(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self._source(arg)
        return [self._sources(a) for a in arg] if type(arg) in _SEQUENCES else arg

    def _holding(self, tensor: Tensor) -> Value:
        value = Value()
        storage = tensor.untyped_storage()  # raises where a layout has none
        self._read[storage._cdata] = weakref.ref(storage)
        if self.unit and isinstance(tensor, Parameter):
            self._gathered.add(storage._cdata)
        if type(tensor) is Parameter and tensor.requires_grad:  # then it is a leaf
            value.keep_leaf(tensor)
            self._leaves.append(value)
            return value
        alias = alias_of(tensor)
        if wants_grad_itself(tensor):
            alias.requires_grad_()  # some kernels are chosen by it
        value.keep(alias)
        self._unfiled.append(weakref.ref(value))
        return value

    def overwrites(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call writes in place: preserve the old contents for the replays that read them.

        Values that a replay can make again let go of the storage; those that can only be held move to a copy of it.
        A gather of FSDP is no such write: it brings back the weights that were read, to a storage that is empty now.
        """
        if self._gathers.filled(func, args, kwargs) or func.namespace == "fsdp":
            return
        collective = traits(func).pin == COLLECTIVE  # so the older FSDP gathers
        for tensor in overwritten(func, args, kwargs):
            storage = storage_of(tensor)
            if storage is None or (collective and storage._cdata in self._gathered):
                continue
            known = self._read.get(storage._cdata)
            if known is not None and known() is storage:
                values = self._on(storage)
                for value in values:
                    self._forget(value)
                    value.sever(storage)
                self._copy_for_holders(values, storage)

    def _on(self, storage: torch.UntypedStorage) -> list[Value]:
        """Every value on a storage. They are filed by storage only now: most steps write nothing in place."""
        self._unfiled += map(weakref.ref, self._leaves)
        self._leaves.clear()
        for ref in self._unfiled:
            value = ref()
            place = value.storage() if value is not None else None
            if place is not None:
                self._file(place, ref)
        self._unfiled.clear()
        known, refs = self._files.pop(storage._cdata, (None, []))
        if known is None or known() is not storage:
            return []
        return [value for ref in refs if (value := ref()) is not None]

    def _file(self, storage: torch.UntypedStorage, ref: weakref.ref[Value]) -> None:
        known, refs = self._files.get(storage._cdata, (None, []))
        if known is None or known() is not storage:
            known, refs = self._files[storage._cdata] = (weakref.ref(storage), [])
        refs.append(ref)

    def _forget(self, value: Value) -> None:
        key = value.program_tensor.key if value.program_tensor is not None else -1
        if self._values.get(key) is value:
            del self._values[key]

    def _copy_for_holders(self, values: list[Value], storage: torch.UntypedStorage) -> None:
        copy = None
        for value in values:
            held = value.get()
            if held is None or held.untyped_storage() is not storage:
                continue
            copy = copy if copy is not None else storage.clone()
            self._read[copy._cdata] = weakref.ref(copy)
            value.keep(held.new_empty(0).set_(copy, held.storage_offset(), held.shape, held.stride()))
            tell_trackers((value.tensor,))

    def bind(self, node: Node, out: Any) -> list[Value | None]:
        """Enter the outputs of a call that has run.

        Returns:
            For each output its value, which the table and the tensors now own; None for an output without a storage.
        """
        enter = self._enter
        made = [enter(node, tensor) for tensor in out] if type(out) in _SEQUENCES else [enter(node, out)]
        if node.written:
            for value, tensor in zip(made, out if type(out) in _SEQUENCES else (out,), strict=True):
                if value is not None:
                    value.version += 1
                    value.layout = (tensor.stride(), tensor.dtype)  # its twin may choose others
        return made

    def track(self, tensor: Tensor, written: bool) -> Value:
        """Enter an output of a call that is not captured, because the value is put away.

        Args:
            tensor: The output, with a storage.
            written: Whether the call wrote it in place, so that its version is about to rise.
        """
        value = Value()
        self._know(value, tensor, tensor.untyped_storage())
        value.version += written
        return value

    def _enter(self, node: Node, tensor: Any) -> Value | None:
        storage = storage_of(tensor) if isinstance(tensor, Tensor) else None
        if storage is None:
            node.outs.append(None)
            return None
        value = Value(node)
        node.outs.append(self._know(value, tensor, storage))
        return value

    def _know(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> weakref.ref[Value]:
        """Enter a value as that of a live tensor."""
        key = id(tensor)
        self._values[key] = value
        value.version = version_of(tensor)
        value.program_tensor = weak = TensorRef(tensor, self._on_death)
        weak.key = key
        self._read[storage._cdata] = value.storage_ref = weakref.ref(storage)
        owner = weakref.ref(value)
        self._unfiled.append(owner)
        return owner

    def let_go(self) -> None:
        """A backward begins: values that only the program's tensors await, such as the loss, are not made again.

        Through its calls the loss would own all that can only be held, such as masks of dropout, to the backward's end.
        """
        self._values.clear()

    def clear(self) -> None:
        """Forget every tensor: the forward is over."""
        self._values.clear()
        self._unfiled.clear()
        self._leaves.clear()
        self._read.clear()
        self._gathers = GatheredStorages()
        self._gathered.clear()
        self._files.clear()


def _copy_of(tensor: Tensor) -> Tensor:
    """The tensor in a storage of its own, with the same strides."""
    with NoTorchDispatch():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)


def view_again(whole: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> Tensor:
    """A part of a tensor that was made again; ``start`` counts elements from its own."""
    return whole.as_strided(shape, stride, whole.storage_offset() + start)


def _is_part(view: Tensor, whole: Tensor) -> bool:
    """Whether a view's elements are the whole's as they are; ``x.data = y`` gives it others."""
    same = view.dtype is whole.dtype and view.is_conj() == whole.is_conj() and view.is_neg() == whole.is_neg()
    return same and view.untyped_storage() is whole.untyped_storage()
