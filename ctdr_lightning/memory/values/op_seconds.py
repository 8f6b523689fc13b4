"""Seconds without a device: a roofline model of a named GPU or of this machine's processor.

Williams et al., CACM 2009. An op takes the larger of its arithmetic time and its memory time, and never less than a
launch. Kernels of a GPU that a roofline does not describe have limits of their own (`kernel_rates`). A GPU that waits
for its host takes the host's time (`behind_host`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ctdr_lightning.basics.devices import DeviceModel, product_flops32_per_s
from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.values.chunk_loop import CHUNKS, Round
from ctdr_lightning.memory.values.kernel_rates import kernel_seconds
from ctdr_lightning.memory.values.op_traits import UNINITIALISED, traits
from ctdr_lightning.memory.values.tensors import has_storage, tensors_in

# Positions of the arguments that a kernel reads a second time: BatchNorm that trains takes its statistics, or their
# gradients, in a pass of its own. Forward: two reads and a write; backward: four reads and a write.
_READ_AGAIN = {
    "aten.native_batch_norm.default": (0,),
    "aten.cudnn_batch_norm.default": (0,),
    "aten.native_batch_norm_backward.default": (0, 1),
    "aten.cudnn_batch_norm_backward.default": (0, 1),
}
# A view is no kernel: the host makes it in about a quarter of an op's time.
_VIEW_SHARE = 0.25
_BF16_CAPABILITY = (8, 0)
_RECURRENT = {"aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"}
# `torch.nn.functional.linear_cross_entropy` with options is one operator, which torch does not count.
_CHUNKED_LOSS = "torch_nn._linear_cross_entropy_batch_chunked"


def op_seconds(device: DeviceModel, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Time of one call on the device.

    Matrix products in fp32 run at TF32's rate where ``torch.get_float32_matmul_precision()`` allows it, convolutions
    where ``torch.backends.cudnn`` does. Neither is the rate of other arithmetic.

    Args:
        device: The device's sustained rates.
        func: The op.
        args: Its arguments; tensors may be fake.
        kwargs: Its keyword arguments.
        out: Its result: a tensor or several.
    """
    what = traits(func)
    if what.view or what.pin == UNINITIALISED:
        return 0.0
    if func is CHUNKS:
        return _loop_seconds(device, args)
    outs = list(tensors_in(out if type(out) in (tuple, list) else (out,)))
    moved = sum(t.nbytes for t in (*tensors_in((*args, *kwargs.values())), *outs) if has_storage(t))
    again = _READ_AGAIN.get(what.name, ()) if device.is_gpu else ()
    moved += sum(args[i].nbytes for i in again if isinstance(args[i], Tensor))
    rate = _rate(device, what.name, outs[0].dtype if outs else torch.float32)
    arithmetic_s, memory_s = op_flops(func, args, kwargs, out) / rate, moved / device.bytes_per_s
    if device.is_gpu:
        return kernel_seconds(device, what.name, args, outs, arithmetic_s, memory_s)
    return max(device.launch_s, arithmetic_s, memory_s)


def behind_host(device: DeviceModel, seconds: Iterable[float]) -> list[float]:
    """Times of a step's ops on a GPU that its host feeds: a kernel starts once it has been handed over.

    The host runs ahead of a busy GPU and costs nothing; behind short kernels the GPU waits. A replayed op is charged
    the wait of its first run.

    Args:
        device: The GPU.
        seconds: Times of the kernels in their order; 0 for a view.
    """
    host_s = gpu_s = 0.0
    found = []
    for kernel_s in seconds:
        host_s += device.host_s if kernel_s else _VIEW_SHARE * device.host_s
        done_s = max(gpu_s, host_s) + kernel_s if kernel_s else gpu_s
        found.append(done_s - gpu_s)
        gpu_s = done_s
    return found


def _loop_seconds(device: DeviceModel, args: tuple[Any, ...]) -> float:
    """Time of our own loop over chunks: that of a round, times their number."""
    seconds: list[float] = []
    one = Round(args, lambda *call: seconds.append(op_seconds(device, *call)))
    n_rounds = ceil(one.n_rounds)
    every = seconds * n_rounds
    return one.n_rounds / n_rounds * sum(behind_host(device, every) if device.is_gpu else every)


def _rate(device: DeviceModel, name: str, dtype: torch.dtype) -> float:
    """Arithmetic a second."""
    if dtype.itemsize <= 2:
        emulated = dtype is torch.bfloat16 and device.is_gpu and device.compute_capability < _BF16_CAPABILITY  # type: ignore[operator]
        return device.flops32_per_s if emulated else device.flops16_per_s
    return product_flops32_per_s(device, by_cudnn="convolution" in name or "cudnn" in name)


def op_flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Arithmetic of one call by torch's formulas; 0 for an op that torch does not count.

    Args:
        func: The op.
        args: Its arguments; tensors may be fake.
        kwargs: Its keyword arguments.
        out: Its result.
    """
    name = traits(func).name
    if name in _RECURRENT:
        return _recurrent_flops(name, args)
    if name.startswith(_CHUNKED_LOSS):
        return _loss_flops(args)
    packet = getattr(func, "_overloadpacket", func)  # a higher-order operator has no packet
    count = flop_registry.get(packet) or flop_registry.get(_out_of_place(packet))
    return count(*args, **kwargs, out_val=out) if count is not None else 0


def _out_of_place(packet: Any) -> Any:
    """The operator that an operator in place, which torch does not count, does in place."""
    name = str(packet).removeprefix("aten.")
    return getattr(torch.ops.aten, name.rstrip("_"), packet) if name.endswith("_") else packet


def _loss_flops(args: tuple[Any, ...]) -> float:
    """Two for each row, class and feature; as many again for each gradient that is made with the loss."""
    rows, (classes, features) = args[0].shape[0], args[1].shape
    return 2 * rows * classes * features * (1 + sum(map(bool, args[12:14])))


def _recurrent_flops(name: str, args: tuple[Any, ...]) -> float:
    """Two for each weight of each step; the backward computes two products for each of the forward's."""
    tensor, weights = args[0], args[1]
    steps = prod(tensor.shape[:-1])
    return 2 * steps * sum(w.numel() for w in weights if w.dim() > 1) * (2 if "backward" in name else 1)
