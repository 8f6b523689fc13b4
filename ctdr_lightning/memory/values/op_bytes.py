"""Bytes that a call is about to make, found on the meta device: nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import flop_registry

from ctdr_lightning.basics.torch_private import NoTorchDispatch, OpOverload
from ctdr_lightning.memory.values.chunk_loop import CHUNKS, chunk_bytes
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.tensors import has_storage, storage_bytes, tensors_in

# Products and convolutions, whose operations torch counts, and these may make more than the largest tensor that they
# read. Others are not asked: some meta kernels, as that of LayerNorm, are Python's and take a millisecond.
_GROWING = {"aten::cat", "aten::clone", "aten::constant_pad_nd", "aten::embedding", "aten::repeat", "aten::stack"}
_UPSAMPLES = "aten::upsample"


def made_bytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the results of a call that may make more than it reads, before it runs; 0 of any other, or if unknown.

    Random calls have no answer, so that no generator can move.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if func is CHUNKS:  # the one op whose workspace is known before it runs, and may be most of the step
        return chunk_bytes(args)
    if not _grows(func) or traits(func).pin:
        return 0
    try:
        with NoTorchDispatch():
            out = func(*_on_meta(args), **{name: _on_meta(arg) for name, arg in kwargs.items()})
    except Exception:  # a kernel that is not there, or refuses the arguments: the call itself will say so
        return 0
    outs = out if type(out) in (tuple, list) else (out,)
    return sum(storage_bytes((tensor,)) for tensor in tensors_in(outs))


def _grows(func: OpOverload) -> bool:
    name = func._schema.name if isinstance(func, OpOverload) else ""
    return name in _GROWING or name.startswith(_UPSAMPLES) or getattr(func, "overloadpacket", None) in flop_registry


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        if type(arg) not in (Tensor, Parameter) or not has_storage(arg):
            raise NotImplementedError(f"{type(arg).__name__} has no copy on the meta device")
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    return [_on_meta(each) for each in arg] if type(arg) in (list, tuple) else arg
