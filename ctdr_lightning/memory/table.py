"""From the live tensors of a forward to their values, and what a write in place does to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ctdr_lightning.memory.live import tell_trackers
from ctdr_lightning.memory.pins import overwritten, pin_reason_of_call, traits, without_running_stats
from ctdr_lightning.memory.tensors import alias_of, storage_of, version_of, wants_grad_itself
from ctdr_lightning.memory.values import Family, Node, TensorRef, Value

_SEQUENCES = (list, tuple)
_NO_OUTPUT = (None, (), torch.float32)


def _forgetter(values: dict[int, Value]) -> Callable[[TensorRef], None]:
    """A callback that drops a dead tensor's entry; it knows the dictionary alone, so that the table is in no cycle."""

    def forget(ref: TensorRef) -> None:
        value = values.get(ref.key)
        if value is not None and value.weak is ref:
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
        self._values: dict[int, Value] = {}
        self._families: dict[int, Family] = {}
        self._holders: dict[int, list[weakref.ref[Value]]] = {}
        self._on_death = _forgetter(self._values)

    def find(self, tensor: Tensor) -> Value | None:
        """The value of a live tensor at its present version, if an op call that can be replayed made it.

        A value of another FSDP unit is held from here on: that unit's weights will be gone when it is needed.
        """
        value = self._values.get(id(tensor))
        if value is None or value.version != version_of(tensor) or value.family is None:
            return None
        if value.family.storage() is not tensor.untyped_storage():
            return None
        if value.node is not None and value.node.unit != self.unit:
            self.hold(value)
        return value

    def hold(self, value: Value) -> None:
        """Hold a live value from now on and let go of what made it."""
        tensor = value.live()
        assert tensor is not None, "the program's own tensor is gone"
        value.keep(alias_of(tensor))
        value.node = None
        self._note_holder(value, tensor.untyped_storage())

    def capture(self, func: OpOverload, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
        """Make the node of a call that is about to run, or None where the call may not be replayed."""
        if pin_reason_of_call(func, args, kwargs):
            return None
        op = traits(func)
        if op.batch_norm:
            args = without_running_stats(func, args, kwargs)
        elif op.written and not self._can_make_again(args[0]):
            return None
        node = Node(func, index, self.unit)
        try:
            node.args = tuple([self._source(a) for a in args])
            if kwargs:
                node.kwargs = {k: self._source(a) for k, a in kwargs.items()}
        except NotImplementedError:  # a layout without a storage, such as sparse: writes to it could not be noticed
            return None
        return node

    def _can_make_again(self, arg: Any) -> bool:
        value = self.find(arg) if isinstance(arg, Tensor) else None
        return value is not None and value.node is not None

    def _source(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.find(arg) or self._holding(arg)
        if type(arg) in _SEQUENCES:
            return [self._source(a) for a in arg]
        return arg

    def _holding(self, tensor: Tensor) -> Value:
        value = Value()
        alias = alias_of(tensor)
        if wants_grad_itself(tensor):
            alias.requires_grad_()  # some kernels are chosen by it
        value.keep(alias)
        self._note_holder(value, tensor.untyped_storage())
        return value

    def _note_holder(self, value: Value, storage: torch.UntypedStorage) -> None:
        self._holders.setdefault(storage._cdata, []).append(weakref.ref(value))

    def overwrites(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call that writes in place runs: what is written must stay what the replays are to read.

        Values that a replay can make again let go of the storage; those that can only be held move to a copy of it.
        """
        for tensor in overwritten(func, args, kwargs):
            storage = storage_of(tensor)
            if storage is not None:
                self._sever_family(storage)
                self._copy_for_holders(storage)

    def _sever_family(self, storage: torch.UntypedStorage) -> None:
        family = self._families.pop(storage._cdata, None)
        if family is not None and family.storage() is storage:
            for value in family.members():
                self._forget(value)
                value.sever(storage)

    def _forget(self, value: Value) -> None:
        key = value.weak.key if value.weak is not None else -1
        if self._values.get(key) is value:
            del self._values[key]

    def _copy_for_holders(self, storage: torch.UntypedStorage) -> None:
        copy = None
        for ref in self._holders.pop(storage._cdata, ()):
            value = ref()
            held = value.get() if value is not None else None
            if value is None or held is None or held.untyped_storage() is not storage:
                continue
            copy = copy if copy is not None else storage.clone()
            value.keep(held.new_empty(0).set_(copy, held.storage_offset(), held.shape, held.stride()))
            tell_trackers((value.tensor,))

    def bind(self, node: Node, out: Any) -> list[Value]:
        """Enter the outputs of a call that has run. Returns their values, which the table and the tensors now own."""
        bump = 1 if traits(node.func).written else 0
        made = []
        for position, tensor in enumerate(out if type(out) in _SEQUENCES else (out,)):
            storage = storage_of(tensor) if isinstance(tensor, Tensor) else None
            if storage is None:
                node.outs.append(_NO_OUTPUT)
                continue
            value = Value(node, position)
            value.version = version_of(tensor) + bump
            value.weak = ref = TensorRef(tensor, self._on_death)
            ref.key = key = id(tensor)
            value.family = self._family_of(storage)
            self._values[key] = value
            owner = weakref.ref(value)
            value.family.values.append(owner)
            node.outs.append((owner, tensor.stride(), tensor.dtype))
            made.append(value)
        return made

    def _family_of(self, storage: torch.UntypedStorage) -> Family:
        found = self._families.get(storage._cdata)
        if found is None or found.storage() is not storage:
            found = self._families[storage._cdata] = Family(storage)
        return found

    def clear(self) -> None:
        """Forget every tensor: the forward is over."""
        self._values.clear()
        self._families.clear()
        self._holders.clear()
