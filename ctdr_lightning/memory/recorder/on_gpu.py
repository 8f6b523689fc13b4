"""A recording on fake tensors that run the kernels of a named GPU, with or without CUDA in this torch.

The fake tensors are on ``"cuda"``. With a card autograd accepts them, and torch's dispatch picks the kernels; only
answers that the card would give come from rules (`gpu_rules`). Without a card autograd refuses them, because there is
no device guard. Then they pose as tensors of the processor, and every choice that torch makes by a tensor's device
comes from rules as well. Both ways give one trace.

Everything is on the GPU, as in a step that has been moved there: a tensor that the step makes on the processor counts
as the GPU's, and without a card ``.cpu()`` copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.torch_private import (
    FakeTensor,
    OpOverload,
    as_composite,
    cuda_thought_available,
    fake_devices_hidden,
    operators_replaced,
)
from ctdr_lightning.memory.recorder import gpu_rules
from ctdr_lightning.memory.recorder.fake_values import ValuedFakes
from ctdr_lightning.memory.recorder.gpu_autocast import Autocast
from ctdr_lightning.memory.recorder.gpu_rules import Rule
from ctdr_lightning.memory.recorder.grouped_mm import GROUPED_MM, grouped_mm

GPU = torch.device("cuda", 0)
_PROCESSOR = torch.device("cpu")
_DEVICE_OF = torch.ops.prim.device.default
_COPY = gpu_rules.aten._to_copy.default
_ONE_AT_A_TIME = RLock()  # rules replace operators in the whole process


class GpuFakes(ValuedFakes):
    """The mode of a recording for a GPU: puts the step's tensors on the GPU, and the reserves of its recurrent layers.

    Args:
        gpu: Model of the card.
        reads_values: Whether the step may read values.
    """

    device = GPU

    def __init__(self, gpu: DeviceModel, *, reads_values: bool = False) -> None:
        super().__init__(reads_values=reads_values)
        self._gpu = gpu
        self._autocast = None if autograd_takes_cuda() else Autocast()

    def from_tensor(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A fake tensor on the GPU, as those are that a module keeps beside its buffers: the state of metrics."""
        return self.new_like(tensor, tensor.dtype).requires_grad_(tensor.requires_grad)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Let the fake tensors run the GPU's kernels."""
        rules = gpu_rules.card_rules(self._gpu)
        with _ONE_AT_A_TIME, ExitStack() as stack:
            stack.enter_context(cuda_thought_available(self._gpu.compute_capability or (0, 0)))
            if self._autocast is not None:
                rules |= gpu_rules.device_rules() | _moves()
                stack.enter_context(fake_devices_hidden(_PROCESSOR))
                stack.enter_context(self._autocast.forgotten_with_torchs())
                stack.enter_context(_replaced(self._autocast.rules(), "AutocastCUDA"))
            stack.enter_context(_replaced(rules, "AutogradCUDA"))
            yield

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on fake tensors."""
        kwargs = kwargs or {}
        if func is _DEVICE_OF and self._autocast is not None:
            return _PROCESSOR
        device = kwargs.get("device")
        # Without a guard torch's own copies name the device that they were told.
        if device is not None and device.type == "cpu" and (func is not _COPY or self._autocast is not None):
            kwargs = {**kwargs, "device": GPU}
        if func is GROUPED_MM:
            return grouped_mm(args, kwargs)
        if func in gpu_rules.FAKE_KERNELS:
            return gpu_rules.FAKE_KERNELS[func](args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return gpu_rules.MENDED[func](args, out) if func in gpu_rules.MENDED else out


@cache
def autograd_takes_cuda() -> bool:
    """Whether autograd takes fake tensors on ``"cuda"``: it does where there is a device guard for them."""
    if torch.backends.cuda.is_built():
        # Without a card the guard counts no devices, and autograd starts no thread for a backward on one.
        return torch.cuda.is_available()
    try:
        torch.Stream(device="cuda")  # asks for the guard; autograd ends the process where there is none
    except RuntimeError:
        return False
    return True


@contextmanager
def _replaced(rules: dict[OpOverload, Rule], key: str) -> Iterator[None]:
    """Replace operators on ``"cuda"`` by rules; calls on real tensors, of another thread, are unaffected."""

    def of(op: OpOverload, rule: Rule) -> Rule:
        def run(*args: Any, **kwargs: Any) -> Any:
            return rule(*args, **kwargs) if _is_fake(args, kwargs) else as_composite(op, *args, **kwargs)

        return run

    with operators_replaced({op: of(op, rule) for op, rule in rules.items()}, key):
        yield


def _is_fake(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one of a recording: its tensors are fake."""
    nest = [*args, *kwargs.values()]
    return any(
        isinstance(part, FakeTensor)
        for entry in nest
        for part in (entry if isinstance(entry, list | tuple) else (entry,))
    )


def _moves() -> dict[OpOverload, Rule]:
    """``to``: a move to where a tensor is, which autograd's answer would take for another device, is none."""
    to = torch.ops.aten.to

    def moved(tensor: Tensor, dtype: torch.dtype | None, kwargs: dict[str, Any]) -> Tensor:
        copy, layout = kwargs.pop("copy", False), kwargs.get("memory_format")
        kept = layout in (None, torch.preserve_format) or tensor.is_contiguous(memory_format=layout)
        if not copy and kept and dtype in (None, tensor.dtype):
            return tensor
        kept_arguments = {name: kwargs[name] for name in ("non_blocking", "memory_format") if kwargs.get(name)}
        return _COPY(tensor, dtype=dtype or tensor.dtype, **kept_arguments)

    def to_device(
        tensor: Tensor, device: Any, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False,
        memory_format: Any = None,
    ) -> Tensor:  # fmt: skip
        return moved(tensor, dtype, {"non_blocking": non_blocking, "copy": copy, "memory_format": memory_format})

    def to_dtype(
        tensor: Tensor, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False, memory_format: Any = None
    ) -> Tensor:
        return moved(tensor, dtype, {"non_blocking": non_blocking, "copy": copy, "memory_format": memory_format})

    def to_other(tensor: Tensor, other: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        return to_dtype(tensor, other.dtype, *rest, **kwargs)

    def to_layout(tensor: Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        if kwargs.get("layout") not in (None, tensor.layout):
            return as_composite(to.dtype_layout, tensor, dtype=dtype, **kwargs)
        return moved(tensor, dtype, kwargs)

    return {to.device: to_device, to.dtype: to_dtype, to.other: to_other, to.dtype_layout: to_layout}
