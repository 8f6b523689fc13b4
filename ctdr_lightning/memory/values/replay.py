"""Recompute a dropped value: walk back to existing values, run the missing ops, free temporaries at their last use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import ReplayError
from ctdr_lightning.basics.torch_private import (
    AUTOCAST_KEYS,
    BelowAutograd,
    ExcludeKeys,
    n_dispatch_modes,
    no_dispatch_modes,
    set_grad_enabled,
)
from ctdr_lightning.memory.traces.facts import SIGN_NODES
from ctdr_lightning.memory.values.live_bytes import tell_trackers
from ctdr_lightning.memory.values.op_traits import call_again
from ctdr_lightning.memory.values.readers import reader
from ctdr_lightning.memory.values.value import Handle, Held, Node, SignHandle, Value, root_of

Keeper = Callable[[Value, Tensor], None]

_ONE_AT_A_TIME = threading.RLock()  # backward threads may ask for the same value


def modified_in_place() -> RuntimeError:
    """The error for a saved tensor whose contents are gone; plain autograd refuses such a step too."""
    return RuntimeError(
        "A tensor that the backward pass needs was modified in place after the forward pass read it. "
        "HINT: replace the in-place operation, or move it after backward()."
    )


def unpack(handle: Handle | Held) -> Tensor:
    """Give autograd the tensor behind a handle, recomputed if it was dropped.

    Raises:
        RuntimeError: If the tensor was modified in place.
        ReplayError: If it waits as its signs, and the reader needs more than these.
    """
    if isinstance(handle, Handle):
        if type(handle) is SignHandle and reader() not in SIGN_NODES:
            raise _reads_more_than_signs(handle)
        return materialize(handle.value)
    tensor = handle.get()
    if tensor is None:
        raise modified_in_place()
    return tensor


def _reads_more_than_signs(handle: SignHandle) -> ReplayError:
    return ReplayError(
        "A ReLU output that the plan keeps as its signs is read by code that may need its contents: a hook, "
        "grad_fn._saved_result, or a custom autograd.Function.",
        "record the step with that code in it, or plan without codecs (codecs=None).",
        read_by_others=(root_of(handle.value).identity,),
    )


def keep_for_good(value: Value, tensor: Tensor) -> None:
    """Hold a replayed value and release its sources."""
    value.keep(tensor)
    value.node = None


def materialize(value: Value, keeper: Keeper = keep_for_good, room: Callable[[], None] | None = None) -> Tensor:
    """The value's tensor, made again if it was dropped.

    Iterative, so that chains of any depth work; the cost is one run of each missing op.

    Args:
        value: The value that autograd or the user asks for.
        keeper: Holds the values that a replay passes and that are still awaited.
        room: Makes room before each op of a replay; None for a replay that a plan has room for.

    Returns:
        A tensor with the exact contents, shape, strides and dtype of the dropped one.

    Raises:
        RuntimeError: If a tensor that the value depends on was modified in place.
    """
    found = value.saved() if value.saved_alias is not None else None
    if found is None:
        found = value.get()
    if found is not None:
        return found
    with _ONE_AT_A_TIME, _plain_execution():
        return _run(value, keeper, room)


def hold_for_views(value: Value) -> None:
    """A saved view's base is held once replayed, so that the next view of it need not run everything again."""
    while value.node is not None and value.node.view:
        value = value.node.args[0]
        value.hold |= value.stays_while_awaited


class _plain_execution:
    """Neither autograd, nor autocast, nor any dispatch mode: the captured calls were seen below all of them."""

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        modes = (no_dispatch_modes(),) if n_dispatch_modes() else ()
        self._guards: tuple[AbstractContextManager[Any], ...] = (*modes, BelowAutograd(), ExcludeKeys(AUTOCAST_KEYS))
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *exc: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*exc)
        set_grad_enabled(self._grad)


def _run(target: Value, keeper: Keeper, room: Callable[[], None] | None) -> Tensor:
    have: dict[Value, Tensor] = {}
    nodes, uses = _missing(target, have)
    for node, sources in nodes:
        if room is not None:
            room()
        _store(node, _outputs(node, have), target, uses, have, keeper)
        for source in sources:
            uses[source] -= 1
            if not uses[source] and source is not target:
                have.pop(source, None)
    return have[target]


def _missing(target: Value, have: dict[Value, Tensor]) -> tuple[list[tuple[Node, list[Value]]], dict[Value, int]]:
    """The op calls to run, in their original order and with their inputs, and the number of reads of each value.

    Fills ``have`` with the sources that exist.
    """
    found: dict[Node, list[Value]] = {}
    uses: dict[Value, int] = {target: 0}
    stack = [target]
    while stack:
        value = stack.pop()
        tensor = value.get()
        if tensor is None and value.away is not None:
            tensor = value.bring_back()
        if tensor is not None:
            have[value] = tensor
        elif value.node is None:
            raise modified_in_place()
        elif value.node not in found:
            found[value.node] = sources = value.node.sources()
            for source in sources:
                if source not in uses:
                    uses[source] = 0
                    stack.append(source)
                uses[source] += 1
    return sorted(found.items(), key=_in_order) if len(found) > 1 else list(found.items()), uses


def _in_order(item: tuple[Node, list[Value]]) -> float:
    return item[0].index


def _real(arg: Any, have: dict[Value, Tensor]) -> Any:
    if type(arg) is Value:
        return have[arg]
    return [_real(a, have) for a in arg] if type(arg) is list else arg


def _outputs(node: Node, have: dict[Value, Tensor]) -> tuple[Any, ...]:
    args = [have[a] if type(a) is Value else _real(a, have) if type(a) is list else a for a in node.args]
    kwargs = {k: _real(a, have) for k, a in node.kwargs.items()} if node.kwargs else node.kwargs
    set_grad_enabled(node.grad)
    out = call_again(node.func, args, kwargs) if node.draw is None else node.draw.again(node.func, args, kwargs)
    outs = out if type(out) in (tuple, list) else (out,)
    tell_trackers(outs)
    return outs


def _store(
    node: Node,
    out: tuple[Any, ...],
    target: Value,
    uses: dict[Value, int],
    have: dict[Value, Tensor],
    keeper: Keeper,
) -> None:
    for ref, tensor in zip(node.outs, out, strict=True):
        value = ref() if ref is not None else None
        if value is None:
            continue
        if value.layout is not None and value.layout != (tensor.stride(), tensor.dtype):
            tensor = _laid_out(tensor, *value.layout)
        if value is target or (uses.get(value) and value not in have):
            have[value] = tensor
        value.remade = True
        awaited = value.hold or (value.stays_while_awaited and value.handles)
        if awaited and value.get() is None:  # else a second copy of a tensor that the program still has
            keeper(value, tensor)


def _laid_out(tensor: Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device).copy_(tensor)
