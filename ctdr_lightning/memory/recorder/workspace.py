"""What ops allocate and free again on a CPU, where no allocator counter tells.

oneDNN's convolutions reorder their operands into blocked layouts, and the matrix products copy operands that BLAS
cannot read. A GPU's allocator is asked at every op (see ``clock``); here each distinct call of such an op is run once
more on dummy tensors, in a thread of its own whose allocations are written down exactly, beside any profiler of the
user's. Fake tensors' calls are run at two small batches and extrapolated, as workspaces are affine in the batch.

A step that is planned for a named GPU on fake tensors runs no kernel. cuBLAS, like BLAS, needs operands with a unit
stride, so its copies are counted as here. cuDNN chooses among algorithms whose workspaces differ by orders of
magnitude, by heuristics that are not published: these workspaces are counted as 0, and the trace says so.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpOverload, allocations_of
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.tensors import tensors_in

_PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
_PROBED = {  # from op to the positions of its batched arguments
    "aten.convolution.default": (0,),
    "aten.convolution_backward.default": (0, 1),
    "aten.native_batch_norm_backward.default": (0, 1),
    "aten.native_layer_norm.default": (0,),
    "aten.native_layer_norm_backward.default": (0, 1, 3, 4),
    "aten._safe_softmax.default": (0,),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (0, 1, 2),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (0, 1, 2, 3, 4, 5),
}
_AFFORDABLE_BYTES = 32 * 2**20
# A prime: no kernel asks for so many bytes by itself.
_MARK_BYTES = 104_729


@dataclass(frozen=True, slots=True)
class _Dummy:
    """What a tensor argument looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def at_batch(self, batch: int) -> _Dummy:
        """The same with another first dimension."""
        return _Dummy((batch, *self.shape[1:]), self.stride, self.dtype)

    def n_bytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self) -> Tensor:
        """A real tensor like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).fill_(1)


@dataclass
class WorkspaceProbe:
    """Collects the calls of a step whose workspace is not known, and measures each distinct one once.

    Attributes:
        fake: Whether the step ran on fake tensors, so that full-size calls are to be avoided.
        other: Name of the other device that the step is planned for; empty where it is this processor.
        unknown: What is not known and why, or the empty string.
    """

    fake: bool = False
    other: str = ""
    unknown: str = ""
    _known: dict[int, int] = field(default_factory=dict)
    _wanted: dict[int, Hashable] = field(default_factory=dict)
    _calls: dict[Hashable, tuple[OpOverload, tuple[Any, ...]]] = field(default_factory=dict)

    def note(self, index: int, func: OpOverload, args: tuple[Any, ...]) -> None:
        """Remember the call behind op ``index`` of the trace."""
        name = traits(func).name
        if name in _PRODUCTS:
            copied = sum(
                t.nbytes
                for t in tensors_in(args)
                if t.layout is torch.strided and t.dim() > 1 and 1 not in t.stride()[-2:]
            )
            if copied:
                self._known[index] = copied
        elif name in _PROBED and not self.other:
            self._wanted[index] = key = (name, *map(_looks, args))
            if key not in self._calls:
                self._calls[key] = (func, tuple(map(_dummy, args)))

    def measure(self) -> dict[int, int]:
        """Workspace bytes by op index. Runs every distinct call once (fake: twice, at affordable batches).

        Where the profiler cannot run (no memory or threads are left for it) only what needs no measuring is told. So
        it is for another device: what this processor's kernels take says nothing about that device's.
        """
        if self.other:
            self.unknown = f"counted as 0: those of {self.other}'s kernels are not known"
            return self._known
        runs = [run for func, call in self._calls.values() for run in self._runs_of(func, call)]
        try:
            taken = iter(_workspaces([(func, call) for func, call, _ in runs]))
        except (RuntimeError, MemoryError) as error:
            self.unknown = f"not measured: {str(error).splitlines()[0]}"
            return self._known
        found = {
            key: round(sum(weight * next(taken) for _, _, weight in self._runs_of(func, call)))
            for key, (func, call) in self._calls.items()
        }
        return {**self._known, **{index: max(found[key], 0) for index, key in self._wanted.items()}}

    def _runs_of(self, func: OpOverload, call: tuple[Any, ...]) -> list[tuple[OpOverload, tuple[Any, ...], float]]:
        """The calls to run for one call, and the weight of each one's workspace."""
        full = call[0].shape[0]
        affordable = max(4, full * _AFFORDABLE_BYTES // max(sum(a.n_bytes() for a in call if isinstance(a, _Dummy)), 1))
        if not self.fake or full <= affordable:
            return [(func, call, 1.0)]
        half = affordable // 2
        slope = (full - half) / half
        low, high = (_at_batch(func, call, batch) for batch in (half, 2 * half))
        return [(func, low, 1 - slope), (func, high, slope)]


def _looks(arg: Any) -> Hashable:
    if isinstance(arg, Tensor):
        return (arg.shape, arg.stride(), arg.dtype)
    return tuple(arg) if type(arg) is list else arg


def _dummy(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return _Dummy(tuple(map(int, arg.shape)), tuple(map(int, arg.stride())), arg.dtype)
    return arg


def _at_batch(func: OpOverload, call: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
    batched = _PROBED[traits(func).name]
    return tuple(a.at_batch(batch) if i in batched else a for i, a in enumerate(call))


def _workspaces(calls: Sequence[tuple[OpOverload, tuple[Any, ...]]]) -> list[int]:
    """For each call the peak of what it allocates above what it leaves behind."""

    def run() -> None:
        with torch.no_grad():
            for func, call in calls:
                args = [a.make() if isinstance(a, _Dummy) else a for a in call]
                _mark()
                out = func(*args)
                _mark()
                del args, out

    sizes = allocations_of(run)
    marks = [i for i, size in enumerate(sizes) if size == _MARK_BYTES]
    return [_peak_above_end(sizes[a + 2 : b]) for a, b in zip(marks[::2], marks[1::2], strict=True)]


def _mark() -> None:
    """Two allocation events that no op makes: one up, one down."""
    torch.empty(_MARK_BYTES, dtype=torch.uint8)


def _peak_above_end(sizes: Sequence[int]) -> int:
    levels = list(accumulate(sizes, initial=0))
    return max(levels) - levels[-1] if levels[-1] > 0 else max(levels)
