"""Fake tensors of a processor, with what torch's fake kernels lack: sizes of workspaces, layouts of BatchNorm.

The workspace of a recurrent layer depends on oneDNN's layout, for which there is no formula: the layer runs once on
zeros. Complexity: a layer's forward, and its memory, for each distinct call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpOverload, no_dispatch_modes, tree_map_only
from ctdr_lightning.memory.recorder.fake_values import ValuedFakes
from ctdr_lightning.memory.recorder.grouped_mm import GROUPED_MM, grouped_mm

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
RECURRENT = (_LAYER, LAYER_BACKWARD)
_WORKSPACE = 3  # its place among the results
_sizes: dict[Hashable, int] = {}


class CpuFakes(ValuedFakes):
    """The mode of a recording for a processor."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on fake tensors."""
        if func is GROUPED_MM:
            return grouped_mm(args, kwargs or {})
        out: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is _LAYER:
            return *out[:_WORKSPACE], out[_WORKSPACE].new_empty(_workspace_size(args))
        return _dense(out, args[_NORMED[func]]) if func in _NORMED else out


def _dense(out: Any, normed: Tensor) -> Any:
    """Results of a BatchNorm, whose kernels on a processor make dense ones: torch's fake ones keep the input's."""
    if normed.device.type != "cpu" or out[0] is None or any(normed.is_contiguous(memory_format=m) for m in _DENSE):
        return out
    return normed.new_empty(normed.shape), *out[1:]


_DENSE = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
# Place of the input among the arguments of the kernels of BatchNorm.
_NORMED = {torch.ops.aten.native_batch_norm.default: 0, torch.ops.aten.native_batch_norm_backward.default: 1}


def _workspace_size(args: Sequence[Any]) -> int:
    looks = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else str(a) for a in args)
    key = (*looks, torch.is_grad_enabled())  # the kernel keeps nothing where no gradient is wanted
    if key not in _sizes:
        with no_dispatch_modes():
            made = _LAYER(*tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), tuple(args)))
        _sizes[key] = made[_WORKSPACE].numel() if made[_WORKSPACE] is not None else 0
    return _sizes[key]


def with_workspace(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a recurrent layer's backward with the workspace of its forward on the same dummies.

    Args:
        args: Its own, of which the last is the workspace.
    """
    # reverse; mode, hidden size, number of layers, biases, train, both ways; lengths; batch first
    reverse, (mode, width, layers, biases, train, both), lengths, first = args[13], args[14:20], args[20], args[21]
    with torch.enable_grad():
        made = _LAYER(*args[:7], reverse, lengths, mode, width, layers, biases, both, first, train)
    return *args[:-1], made[_WORKSPACE]
