"""Limits of a GPU's kernels other than its memory and its arithmetic.

Some kernels are far slower than a roofline: their threads are few, or each element takes as long in 16 bits as in 32.
The rates below are those of an H200 under torch 2.11 (``docs/data/gpu-h200.json``), rounded, over ResNet-50, ViT-B/16,
GPT-2 medium and a U-Net in NCHW. They hold for a card of any memory, whose own bandwidth is the limit where it is the
lower one: on an H100 the step of ResNet-50 took 1.09 times as long.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.memory.values.tensors import is_channels_last, tensors_in

# Elements of the largest tensor a second, of images in NCHW.
_ELEMENTS_PER_S = {
    "aten.native_batch_norm.default": 110e9,  # one block of threads a channel
    "aten.native_batch_norm_backward.default": 70e9,
    "aten.cudnn_batch_norm.default": 200e9,
    "aten.cudnn_batch_norm_backward.default": 100e9,
    "aten.native_layer_norm.default": 210e9,
    "aten.native_layer_norm_backward.default": 95e9,
    "aten.max_pool2d_with_indices.default": 280e9,
    "aten.max_pool2d_with_indices_backward.default": 95e9,
    "aten.sum.dim_IntList": 650e9,
}
# Copies between layouts, by elements that are read: the same in 16 and in 32 bits.
_COPIES = {"aten.clone.default", "aten._to_copy.default", "aten.copy_.default", "aten.stack.default"}
_STRIDED_PER_S = 270e9
_PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
# Tensor cores take 8 elements of 16 bits at once, so that rows must begin at multiples of 8: logits of 50,257 words are
# made at a fifth of the rate.
_ALIGNED, _UNALIGNED_SHARE = 8, 0.2
_CONVOLUTION_SHARE = 0.55  # of the arithmetic of a large matrix product
_CONVOLUTIONS = {"aten.convolution.default", "aten.convolution_backward.default"}
_TENSOR_CORES = (7, 0)
# cuDNN's recurrent layers hand over their kernels for each position, layer and direction.
_RECURRENT_S = {"aten._cudnn_rnn.default": 20e-6, "aten._cudnn_rnn_backward.default": 32e-6}
_STATE, _BATCH_FIRST, _BATCH_SIZES = 4, 10, 14  # positions in the arguments of `_cudnn_rnn`
_LATER = {"aten._cudnn_rnn.default": 0, "aten._cudnn_rnn_backward.default": 4}  # the last two in its backward
# The result has the storage of the argument, although the schema tells nothing of it.
_NO_KERNELS = {"aten._unsafe_view.default"}


def kernel_seconds(
    gpu: DeviceModel, name: str, args: tuple[Any, ...], outs: list[Tensor], arithmetic_s: float, memory_s: float
) -> float:
    """Time of one call on a GPU.

    Args:
        gpu: Model of the card.
        name: Name of the op.
        args: The call's arguments.
        outs: Its results.
        arithmetic_s: Its time by the card's arithmetic alone.
        memory_s: Its time by the card's memory alone.
    """
    if name in _NO_KERNELS:
        return 0.0
    least_s = max(gpu.launch_s, _least_seconds(name, args, outs))
    turned_s = _turned_bytes(gpu, name, args, outs) / gpu.bytes_per_s
    return max(least_s, arithmetic_s / _share_of_rate(gpu, name, args, outs), memory_s) + turned_s


def _least_seconds(name: str, args: tuple[Any, ...], outs: list[Tensor]) -> float:
    """Time that the kernels take whatever the card's rates; 0 where these are the limit."""
    if name in _RECURRENT_S:
        return _RECURRENT_S[name] * _sequential_steps(name, args)
    given = list(tensors_in(args))
    if name in _COPIES:
        strided = any(not t.is_contiguous() for t in (*given, *outs))
        return sum(t.numel() for t in given) / _STRIDED_PER_S if strided else 0.0
    if name not in _ELEMENTS_PER_S or any(map(is_channels_last, (*given, *outs))):
        return 0.0
    return max(t.numel() for t in (*given, *outs)) / _ELEMENTS_PER_S[name]


def _share_of_rate(gpu: DeviceModel, name: str, args: tuple[Any, ...], outs: list[Tensor]) -> float:
    """Share of the card's arithmetic that a product or a convolution reaches on tensor cores."""
    half = all(t.dtype.itemsize == 2 for t in outs)
    if name in _CONVOLUTIONS:
        return _CONVOLUTION_SHARE if half or gpu.flops_tf32_per_s else 1.0
    if not half or name not in _PRODUCTS:
        return 1.0
    return 1.0 if all(map(_is_aligned, (*tensors_in(args), *outs))) else _UNALIGNED_SHARE


def _is_aligned(matrix: Tensor) -> bool:
    """Whether the rows of a matrix, or its columns where these are contiguous, begin at multiples of 8 elements."""
    if matrix.dim() < 2 or min(matrix.shape[-2:]) == 1:
        return True
    return max(matrix.stride()[-2:]) % _ALIGNED == 0


def _turned_bytes(gpu: DeviceModel, name: str, args: tuple[Any, ...], outs: list[Tensor]) -> int:
    """Bytes that cuDNN moves to turn a 16-bit convolution in NCHW around: operands and results, read and written."""
    if name not in _CONVOLUTIONS or (gpu.compute_capability or (0, 0)) < _TENSOR_CORES:
        return 0
    given = [t for t in tensors_in(args) if t.dim() > 2]
    if any(t.dtype.itemsize != 2 or is_channels_last(t) for t in given):
        return 0
    return 2 * sum(t.nbytes for t in (*given, *outs))


def _sequential_steps(name: str, args: tuple[Any, ...]) -> int:
    """Steps of a recurrent layer that wait for each other: positions times layers times directions."""
    batch_first, sizes = args[_BATCH_FIRST + _LATER[name]], args[_BATCH_SIZES + _LATER[name]]
    positions = len(sizes or ()) or args[0].shape[1 if batch_first else 0]
    return positions * args[_STATE].shape[0]
