"""Ops that may be run again: functional twins, BatchNorm without its side effect, and the ops that are pinned.

torch's own operators declare their writes and their randomness. Those of other libraries need not: each of
them is unproven until :class:`~ctdr_lightning.memory.values.op_trial.OpTrial` has seen it repeat itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import FakeTensor, OpOverload
from ctdr_lightning.memory.values.tensors import has_storage, tensors_in

COLLECTIVE = "collective"
FILLABLE = "a constant that a kernel may fill"
UNPROVEN = "an operator that was not seen to repeat itself"
RANDOM = "random"
# Pure functions of their arguments and the default generator of their first argument's device. Left out: ops that take
# a generator, which may be the user's own; dropout within cuDNN's recurrent layers, whose state is cuDNN's.
_DRAWS = {
    f"aten.{name}.default"
    for name in (
        "native_dropout", "rand_like", "randn_like", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    )
}  # fmt: skip
_EXCHANGING = {"c10d", "_c10d_functional", "c10d_functional", "fsdp", "symm_mem", "_dtensor"}
UNINITIALISED = "uninitialised memory"
_UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
# Operators of these are declared in full: torch's own, those of torchvision, which are pure functions, and ours.
_DECLARED = {"aten", "prims", "prim", "quantized", "mkldnn", "torchvision", "ctdr_lightning"}
# They read no tensor's contents, so their result is a constant until something fills it.
FACTORIES = {
    f"aten.{name}.{overload}"
    for name in ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
    for overload in ("default", "names", "out")
}
# Forward kernels that add with atomics on a GPU, in another order each time: the list of
# `torch.use_deterministic_algorithms` in torch 2.13, the forward ones.
ATOMIC = {
    "index_add", "index_put", "_index_put_impl_", "put", "scatter_add", "scatter_reduce", "index_reduce", "cumsum",
    "histc", "bincount", "kthvalue", "median", "nanmedian", "nll_loss2d_forward", "_embedding_bag",
    "_embedding_bag_forward_only", "segment_reduce",
}  # fmt: skip
# Outputs that their op's own backward alone reads, with parts that no kernel writes: those hold anything. Two runs of
# mkldnn_rnn_layer differ there on a processor; of the others torch 2.13's sources allocate more than they write, as
# padding of the log-sum-exp, as seeds of a dropout of 0, as cuDNN's reserve.
_WORKSPACES = {
    "mkldnn_rnn_layer": (3,),
    "cudnn_batch_norm": (3,),
    "_scaled_dot_product_flash_attention": (6, 7, 8),
    "_scaled_dot_product_efficient_attention": (1, 2, 3),
    "_scaled_dot_product_cudnn_attention": (1, 6, 7, 8),
}
# cuDNN writes into the reserve of a recurrent layer while it computes the layer's gradients, which no schema declares:
# torch copies it where the graph is retained (tools/autograd/derivatives.yaml). A second run gives other gradients.
_WRITES_UNDECLARED = {"aten._cudnn_rnn_backward.default", "aten.miopen_rnn_backward.default"}
_RUNNING_STATS = ("running_mean", "running_var")
_INDICES = {torch.int64, torch.int32, torch.bool}
_RESIZING = {"resize_", "resize_as_", "set_", "_resize_output_"}
_OWN_TYPES = {Tensor, torch.nn.Parameter, FakeTensor}


class OpTraits:
    """The tape's knowledge of an op, read from its schema once.

    Attributes:
        func: The op.
        name: Full name, such as ``"aten.relu.default"``.
        batch_norm: Whether it updates running statistics as a side effect, declared or hidden.
        written: Positions of the arguments that it writes in place; running statistics do not count.
        writes: Position and name of every argument that it writes, running statistics and ``out=`` included.
        view: Whether an output shares its input's storage unwritten.
        twin: The op that computes the same values out of place; None if there is none.
        dropout: Position of the dropout probability of an op that is random only through it, else None.
        draws: Whether a random call of the op may run again from its generator's state.
        training: Position of the argument that tells whether BatchNorm trains; None where it always does.
        stats: Position of the first of BatchNorm's two running statistics.
        restrides: Whether it reads a storage beyond its argument's own elements.
        pin: Why no call of the op may be replayed, or the empty string.
        foreign: Whether the op is another library's, which declares less than torch does.
        unproven: Whether it is foreign, and nobody has seen yet that it repeats itself.
        atomic: Whether its forward adds in no fixed order on a GPU.
        shaped_by_numbers: Whether the shape of its result follows from contents.
        workspaces: Positions of the outputs of which parts hold anything.
        special: Whether a call must be looked at before it is captured.
    """

    __slots__ = (
        "atomic", "batch_norm", "draws", "dropout", "foreign", "func", "name", "pin", "restrides", "shaped_by_numbers",
        "special", "stats", "training", "twin", "unproven", "view", "workspaces", "writes", "written",
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
        self.draws = self.name in _DRAWS
        self.restrides = "as_strided" in schema.name
        self.atomic = schema.name.split("::")[1].removesuffix("_") in ATOMIC
        self.workspaces: tuple[int, ...] = _WORKSPACES.get(schema.name.split("::")[1], ())
        self.shaped_by_numbers = torch.Tag.dynamic_output_shape in func.tags
        self.pin = self._pin(schema.name, random)
        self.foreign = func.namespace not in _DECLARED
        self.unproven = self.foreign and not self.pin
        self._look()

    def _look(self) -> None:
        self.special = bool(
            self.pin or self.unproven or self.written or self.batch_norm or self.restrides or self.dropout is not None
        )

    def tried(self, pin: str) -> None:
        """Note the result of a foreign op's trial: why it may never run again, or the empty string."""
        self.pin, self.unproven = pin, False
        self._look()

    def _be_opaque(self) -> None:
        """Make this a higher-order operator: it has no schema, so nothing is known of the functions that it calls."""
        self.name = f"higher_order.{self.name}"
        self.batch_norm = self.view = self.restrides = self.atomic = self.shaped_by_numbers = False
        self.foreign = self.unproven = self.draws = False
        self.workspaces = ()
        self.training = self.dropout = self.twin = None
        self.stats = 0
        self.written = self.writes = ()
        self.pin, self.special = "higher-order operator", True

    def _pin(self, full_name: str, random: bool) -> str:
        namespace, name = full_name.split("::")
        if namespace in _EXCHANGING:
            return COLLECTIVE
        if name in _UNINITIALISED:
            return UNINITIALISED
        if name in _RESIZING:
            return "another storage"
        if random and self.dropout is None:
            return RANDOM
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


_ON_DUMMIES = ("aten", "torch_nn", "ctdr_lightning")  # namespaces; the last two have losses written in Python


def may_run_on_dummies(func: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """Whether a call may be run once more on made-up contents: torch's or ours, without effects, and safe on them.

    Floats of any value are, and so is the index 0 where there is anything; bytes may be an op's own notes. The backward
    of an LSTM takes sizes and places from its forward's, and ends the process where these are made up.

    Args:
        func: The op.
        tensors: All that it takes; they may be fake.
    """
    safe = isinstance(func, OpOverload) and func.namespace in _ON_DUMMIES and traits(func).pin != COLLECTIVE
    return safe and all(has_storage(t) and t.numel() and (is_float(t.dtype) or t.dtype in _INDICES) for t in tensors)


def is_float(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of real or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def pin_reason_of_call(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why this call may not simply run again, or the empty string."""
    op = traits(func)
    if op.dropout is not None and not op.pin:
        return RANDOM if _argument(func, "dropout_p", args, kwargs, 0.0) else ""
    if op.restrides and args[0].nbytes != args[0].untyped_storage().nbytes():
        return "reads its storage beyond its argument"
    return op.pin or (UNPROVEN if op.unproven else "")


def pin_reason_of_replay(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why this call may not be replayed, its generator's state given; the empty string where it may."""
    reason = pin_reason_of_call(func, args, kwargs)
    draws_again = reason == RANDOM and traits(func).draws and args[0].device.type in ("cpu", "cuda")
    return "" if draws_again else reason


def may_run_twice(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call leaves the same behind when it runs twice: no write, no random number, no other process."""
    op = traits(func)
    if op.writes or op.name in _WRITES_UNDECLARED or pin_reason_of_call(func, args, kwargs):
        return False
    return not pin_reason_of_types(tuple({type(tensor) for tensor in tensors_in((*args, *kwargs.values()))}))


def pin_reason_on_gpu(func: OpOverload, args: tuple[Any, ...], out: Tensor) -> str:
    """Why a result of a call on a GPU may not be replayed there, or the empty string.

    A replay in the backward's thread may give other bits (another algorithm, sums in another order). Indices and shapes
    that follow from floating-point numbers could then be others, which is worse than a last bit.
    """
    op = traits(func)
    if op.atomic and not torch.are_deterministic_algorithms_enabled():
        return "sums in no fixed order on a GPU"
    if op.shaped_by_numbers and (not op.name.startswith("aten.index.") or _has_mask(args[1])):
        return "its shape follows from contents"
    if op.name in FACTORIES:
        return FILLABLE
    integral = not (out.is_floating_point() or out.is_complex() or out.dtype is torch.bool)
    if integral and any(t.is_floating_point() for t in tensors_in(args)):
        return "an index from floating-point numbers"
    return ""


def _has_mask(indices: Any) -> bool:
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)


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
