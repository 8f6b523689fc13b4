"""Operators of a tile that its backward does not need: they are not run again, as under a plan.

The backward of a tile needs what autograd saved, and not the outputs: the last product of an MLP is half of its
forward. A trial notes the operators of a forward and the tensors that autograd saves; needless is what these do not
depend on. When a tile is made again, these give one uninitialised number, expanded to their shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ctdr_lightning.basics.torch_private import (
    OpMode,
    OpOverload,
    StorageWeakRef,
    no_dispatch_modes,
    tree_leaves,
    tree_map_only,
)
from ctdr_lightning.memory.values.op_traits import is_float, pin_reason_of_call, traits

# These ask an argument for its shape alone; of a dropout the mask is needed, which was drawn before.
_DROPOUT = torch.ops.aten.native_dropout.default
_BY_SHAPE = (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default, _DROPOUT)
# The operators of a forward, less views, in their order, and whether the backward can do without each.
Needless = tuple[tuple[Any, bool], ...]


class OtherOperators(Exception):
    """A tile runs other operators than the trial did."""


class _Ledger(OpMode):
    """Notes each operator with the storages that it reads, and of results that depend on their contents.

    It holds all of them, so that no two have one address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, bool, set[int], set[int]]] = []
        self._held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _is_view(func):
            return out
        self._held.append((args, kwargs, out))
        read, made = _storages((args, kwargs)), _storages(out)
        fresh = bool(read) and not made & read and all(isinstance(leaf, Tensor) for leaf in tree_leaves(out))
        pure = fresh and _depends_on_shapes(func, kwargs) and not pin_reason_of_call(func, args, kwargs)
        self.noted.append((func, pure, read, _storages(out[0]) if func is _DROPOUT else made))
        return out


def needless_operators(run: Callable[[], object]) -> Needless:
    """The operators that a forward with gradients runs, and which of them its backward can do without.

    Args:
        run: The forward.
    """
    needed: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        needed.add(tensor.untyped_storage()._cdata)  # the tensor would hold its graph, and this the tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor), _Ledger() as ledger:
        result = run()
    found = []
    for func, pure, read, made in reversed(ledger.noted):
        needless = pure and bool(made) and not made & needed
        if not needless and (func not in _BY_SHAPE or (func is _DROPOUT and made & needed)):
            needed |= read
        found.append((func, needless))
    del result
    return tuple(reversed(found))


class WithoutNeedless(OpMode):
    """Leaves out the operators of a tile that its backward does not need.

    Args:
        operators: Of the trial.
        unmade: The integer to put in the place of results, and NaN in that of floats, for a trial. None leaves memory
            as it was found.

    Raises:
        OtherOperators: If the tile does not run these operators, or reads what was left out.
    """

    def __init__(self, operators: Needless, unmade: int | None = None) -> None:
        super().__init__()
        self._operators, self._n_seen, self._value = operators, 0, unmade
        self._unmade: dict[int, StorageWeakRef] = {}  # while one is held, no other storage gets its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, index = kwargs or {}, self._n_seen
        if _is_view(func):
            return func(*args, **kwargs)
        self._n_seen += 1
        if index >= len(self._operators) or self._operators[index][0] is not func:
            raise OtherOperators
        if self._operators[index][1]:
            try:
                return self._left_out(func, args, kwargs)
            except NotImplementedError:  # no shapes without contents; it runs, perhaps on what was left out
                return func(*args, **kwargs)
        if self._unmade and func not in _BY_SHAPE and _storages((args, kwargs)) & self._unmade.keys():
            raise OtherOperators
        return func(*args, **kwargs)

    def _left_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        with no_dispatch_modes():
            shapes = func(*tree_map_only(Tensor, _meta, args), **tree_map_only(Tensor, _meta, kwargs))

        def unmade(shape: Tensor) -> Tensor:
            one = torch.empty((), dtype=shape.dtype, device=device)
            storage = one.untyped_storage()
            self._unmade[storage._cdata] = StorageWeakRef(storage)
            if self._value is not None:
                one.fill_(math.nan if is_float(one.dtype) else self._value)
            return one.expand(shape.shape)

        return tree_map_only(Tensor, unmade, shapes)


def _is_view(func: Any) -> bool:
    """Whether a call makes nothing. How often a tensor is detached depends on the hooks of saved tensors."""
    return not isinstance(func, OpOverload) or func.namespace == "prim" or traits(func).view


def _depends_on_shapes(func: OpOverload, kwargs: dict[str, Any]) -> bool:
    """Whether a call has no effect but results whose shapes and device follow from those of its arguments."""
    return not func._schema.is_mutable and not traits(func).shaped_by_numbers and kwargs.get("device") is None


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _storages(nest: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)}
