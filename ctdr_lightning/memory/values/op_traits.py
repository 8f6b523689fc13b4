"""Which ops may be run again, and how: functional twins, BatchNorm without its side effect, and what is pinned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import FakeTensor, OpOverload

COLLECTIVE = "collective"
_EXCHANGING = {"c10d", "_c10d_functional", "c10d_functional", "fsdp", "symm_mem", "_dtensor"}
_UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_RUNNING_STATS = ("running_mean", "running_var")
_RESIZING = {"resize_", "resize_as_", "set_", "_resize_output_"}
_OWN_TYPES = {Tensor, torch.nn.Parameter, FakeTensor}


class OpTraits:
    """What the tape must know of an op, read from its schema once.

    Attributes:
        func: The op.
        name: Full name, such as ``"aten.relu.default"``.
        batch_norm: Whether it updates running statistics as a side effect, declared or hidden.
        written: Positions of the arguments that it writes in place; running statistics do not count.
        writes: Position and name of every argument that it writes, running statistics and ``out=`` included.
        view: Whether an output shares its input's storage unwritten.
        twin: The op that computes the same values out of place; None when there is none.
        dropout: Position of the dropout probability of an op that is random only through it, else None.
        training: Position of the argument that tells whether BatchNorm trains; None where it always does.
        stats: Position of the first of BatchNorm's two running statistics.
        restrides: Whether it reads a storage beyond its argument's own elements.
        pin: Why no call of the op may be replayed, or the empty string.
        special: Whether a call must be looked at before it is captured.
    """

    __slots__ = (
        "batch_norm", "dropout", "func", "name", "pin", "restrides", "special", "stats", "training", "twin", "view",
        "writes", "written",
    )  # fmt: skip

    def __init__(self, func: OpOverload) -> None:
        self.func = func
        self.name = str(func)
        if not isinstance(func, OpOverload):
            self._be_opaque()
            return
        schema = func._schema
        self.batch_norm = "batch_norm" in schema.name and set(_RUNNING_STATS) <= {a.name for a in schema.arguments}
        self.training = next((i for i, a in enumerate(schema.arguments) if a.name in ("training", "train")), None)
        self.stats = _position(func, _RUNNING_STATS[0]) or 0
        mutable = schema.is_mutable and not self.batch_norm
        self.written = tuple(
            i for i, a in enumerate(schema.arguments) if mutable and a.alias_info is not None and a.alias_info.is_write
        )
        self.writes = tuple(
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if i in self.written or (self.batch_norm and a.name in _RUNNING_STATS)
        )
        self.view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
        self.twin = _out_of_place(func) if mutable else func
        random = torch.Tag.nondeterministic_seeded in func.tags
        self.dropout = _position(func, "dropout_p") if random else None
        self.restrides = "as_strided" in schema.name
        self.pin = self._pin(schema.name, random)
        self.special = bool(self.pin or self.written or self.batch_norm or self.restrides or self.dropout is not None)

    def _be_opaque(self) -> None:
        """Make this a higher-order operator: it has no schema, so nothing is known of the functions that it calls."""
        self.name = f"higher_order.{self.name}"
        self.batch_norm = self.view = self.restrides = False
        self.training = self.dropout = self.twin = None
        self.stats = 0
        self.written = self.writes = ()
        self.pin, self.special = "higher-order operator", True

    def _pin(self, full_name: str, random: bool) -> str:
        namespace, name = full_name.split("::")
        if namespace in _EXCHANGING:
            return COLLECTIVE
        if name in _UNINITIALISED:
            return "uninitialised memory"
        if name in _RESIZING:
            return "another storage"
        if random and self.dropout is None:
            return "random"
        return "" if self.twin is not None else "in-place without a functional twin"


# Keyed by identity, as an op's own hash is a Python method that costs more than all of `traits`. Every entry holds its
# op, so that no other op (a custom one registered anew) can come by the same identity.
_TRAITS: dict[int, OpTraits] = {}


def traits(func: OpOverload) -> OpTraits:
    """The op's traits, read once; those of a higher-order operator say that it may not run again."""
    try:
        return _TRAITS[id(func)]
    except KeyError:
        found = _TRAITS[id(func)] = OpTraits(func)
        return found


def _out_of_place(func: OpOverload) -> OpOverload | None:
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, func._overloadname, None) if packet is not None else None


def pin_reason_of_call(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why this call may not be replayed, or the empty string."""
    op = traits(func)
    if op.dropout is not None and not op.pin:
        return "random" if _argument(func, "dropout_p", args, kwargs, 0.0) else ""
    if op.restrides and args[0].nbytes != args[0].untyped_storage().nbytes():
        return "reads its storage beyond its argument"
    return op.pin


@cache
def pin_reason_of_types(types: tuple[type, ...]) -> str:
    """Why a call on these tensor types may not be replayed: a subclass may hide collectives or other effects."""
    foreign = sorted(t.__name__ for t in set(types) - _OWN_TYPES)
    return f"tensor subclass {foreign[0]}" if foreign else ""


def overwritten(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose contents a call changes: in place, as ``out=``, or as BatchNorm's running statistics."""
    op = traits(func)
    if op.batch_norm and not _trains(func, args, kwargs):
        return []
    found: list[Tensor] = []
    for position, name in op.writes:
        arg = args[position] if position < len(args) else kwargs.get(name)
        found.extend(t for t in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(t, Tensor))
    return found


@cache
def _position(func: OpOverload, name: str) -> int | None:
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == name), None)


def _argument(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any) -> Any:
    position = _position(func, name)
    if position is not None and position < len(args):
        return args[position]
    return kwargs.get(name, default)


def without_running_stats(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The call's arguments with a dtype in the place of each running statistic that training mode only writes.

    A replay must not update them a second time, and their values at that time are gone.
    """
    first = traits(func).stats
    if not _trains(func, args, kwargs) or args[first] is None:
        return args
    return (*args[:first], args[first].dtype, args[first + 1].dtype, *args[first + 2 :])


def _trains(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    position = traits(func).training
    if position is None:
        return True
    return bool(args[position]) if position < len(args) else bool(kwargs[func._schema.arguments[position].name])


@cache
def _needs_running_stats(func: OpOverload) -> bool:
    kinds = {a.name: str(a.type) for a in func._schema.arguments}
    return not kinds["running_mean"].startswith("Optional")


def call_again(func: OpOverload | Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op, or its shortcut, for its outputs alone: no write to its inputs, no second update of statistics."""
    if not isinstance(func, OpOverload):
        return func(*args, **kwargs)
    op = traits(func)
    if op.batch_norm:
        return func(*_throwaway_stats(func, args), **kwargs)
    twin = op.twin
    assert twin is not None, f"{func} was captured although it cannot be replayed"
    return twin(*args, **kwargs)


def _throwaway_stats(func: OpOverload, args: list[Any]) -> list[Any]:
    first = traits(func).stats
    if not isinstance(args[first], torch.dtype):
        return args
    stats: list[Tensor | None] = [None, None]
    if _needs_running_stats(func):
        stats = [args[0].new_zeros(args[0].shape[1], dtype=dtype) for dtype in args[first : first + 2]]
    return [*args[:first], *stats, *args[first + 2 :]]
