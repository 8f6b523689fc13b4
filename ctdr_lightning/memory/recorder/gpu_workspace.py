"""A model of the memory that cuBLAS and cuDNN take in addition to tensors on a named GPU.

cuBLAS gets one workspace a handle from torch's allocator and keeps it; there is a handle a thread, and autograd runs
the backward in a thread of its own: two (aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`).

cuDNN chooses among plans whose workspaces differ by orders of magnitude, by heuristics that are not published. Modelled
is the need common to all its 16-bit kernels for tensor cores. They compute in NHWC, so that operands and result in NCHW
are turned around (``nchwToNhwcKernel`` in any profile of such a net). Gradients of weights are summed up in fp32.
Kernels in fp32 and TF32 take NCHW and are counted as 0. Where memory is short torch falls back on plans that need less
(aten/src/ATen/native/cudnn/Conv_v8.cpp, `try_plans`), so that the model is no least need.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.tensors import is_channels_last

MODELLED = "modelled: cuDNN turns 16-bit convolutions in NCHW around; all others are counted as 0"
_HANDLES = 2
_KIB = 1024
_HOPPER = (9, 0)
_TENSOR_CORES = (7, 0)
_FP32_BYTES = 4
_TARGET_AND_MASKS_BYTES = 11  # of a row: an index of 8 bytes, and three flags


def cublas_bytes(gpu: DeviceModel) -> int:
    """Bytes that cuBLAS holds from the first matrix product on, in addition to the tensors of a step."""
    configured = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    pairs = configured or ([(4096, 8)] if gpu.compute_capability == _HOPPER else [(4096, 2), (16, 8)])
    return _HANDLES * sum(int(size) * int(count) * _KIB for size, count in pairs)


def beside_the_step(gpu: DeviceModel) -> str:
    """A sentence on the memory of a GPU that a step's peak leaves out."""
    context, cublas, all_bytes = map(format_bytes, (gpu.context_bytes, cublas_bytes(gpu), gpu.memory_bytes))
    return (
        f"In addition: about {context} for CUDA's context, {cublas} for cuBLAS, of {all_bytes} in all. Workspaces of "
        "cuDNN are modelled in part: leave room for them."
    )


def convolution_workspace_bytes(gpu: DeviceModel, name: str, args: tuple[Any, ...]) -> int:
    """Bytes that cuDNN takes inside one convolution, by the model above.

    Args:
        gpu: Model of the card.
        name: Name of the op: ``aten.convolution.default`` or its backward.
        args: The call's arguments.
    """
    backward = name == "aten.convolution_backward.default"
    if not backward and name != "aten.convolution.default":
        return 0
    image, weight = args[1 if backward else 0], args[2 if backward else 1]
    half = image.dtype in (torch.float16, torch.bfloat16)
    if not half or (gpu.compute_capability or (0, 0)) < _TENSOR_CORES:
        return 0
    summed = _FP32_BYTES * weight.numel() if backward else 0
    if is_channels_last(image) or is_channels_last(weight):
        return summed
    result_bytes = args[0].nbytes if backward else _result_bytes(image, weight, args)
    return int(summed + image.nbytes + weight.nbytes + result_bytes)


def chunked_loss_bytes(func: OpOverload, args: tuple[Any, ...]) -> int:
    """Bytes inside `torch.nn.functional.linear_cross_entropy`, by torch's own code; 0 for any other op.

    A chunk of logits and its row sums, the weight, target and masks of every row, and the gradient of the weight once
    more, unless the policy is to save that (torch/nn/modules/linear_cross_entropy.py, `_ChunkContext`).

    Args:
        func: The op.
        args: The call's arguments.
    """
    if not traits(func).name.startswith("torch_nn._linear_cross_entropy"):
        return 0
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
    rows, weight, chunk = given["input"].shape[0], given["linear_weight"], given["batch_chunk_size"]
    item = given["acc_dtype"].itemsize
    again = 0 if given["acc_policy"] == "compact" else item * weight.numel()
    return int(chunk * (weight.shape[0] + 2) * item + rows * (item + _TARGET_AND_MASKS_BYTES) + again)


def _result_bytes(image: Tensor, weight: Tensor, args: tuple[Any, ...]) -> int:
    """Bytes of the result of ``convolution``."""
    stride, padding, dilation, transposed, more, groups = args[3:9]
    n_elements = image.shape[0] * (weight.shape[1] * groups if transposed else weight.shape[0])
    for i, (side, kernel) in enumerate(zip(image.shape[2:], weight.shape[2:], strict=True)):
        # torch gives one number for all axes where they agree
        step, pad, spread, extra = (given[i if len(given) > 1 else 0] for given in (stride, padding, dilation, more))
        reach = spread * (kernel - 1)
        if transposed:
            n_elements *= (side - 1) * step - 2 * pad + reach + extra + 1
        else:
            n_elements *= (side + 2 * pad - reach - 1) // step + 1
    return int(n_elements * image.element_size())
