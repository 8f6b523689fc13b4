"""Memory that ops allocate and free again on a CPU, where no allocator counts.

oneDNN's kernels reorder their operands into blocked layouts, matrix products copy operands that BLAS cannot read,
reductions and casts have buffers of their own. A GPU's allocator is asked at every op (see ``clock``); here the
allocations of the thread that runs a call are written down exactly, unless the call is proven to need no workspace.

Where that cannot be (fake tensors compute nothing, and a profiler of the user's watches the thread already) each
distinct call is run once more on dummy tensors, in a thread of its own. Fake tensors' calls are run at two small
batches and extrapolated, as workspaces are affine in the batch.

A step that is planned for a named GPU on fake tensors runs no kernel. cuBLAS, like BLAS, needs operands with a unit
stride, so its copies are counted as here. cuDNN's workspaces are modelled (`gpu_workspace`), and the trace says so; for
any other device they are counted as 0.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.torch_private import (
    OpOverload,
    start_watching,
    stop_watching,
    tree_flatten,
    tree_map_only,
)
from ctdr_lightning.memory.recorder.gpu_workspace import MODELLED, chunked_loss_bytes, convolution_workspace_bytes
from ctdr_lightning.memory.recorder.on_cpu import LAYER_BACKWARD, RECURRENT, with_workspace
from ctdr_lightning.memory.tape.clock import CpuClock, Timed
from ctdr_lightning.memory.values.chunk_loop import CHUNKS, Round
from ctdr_lightning.memory.values.op_traits import COLLECTIVE, is_float, may_run_on_dummies, traits
from ctdr_lightning.memory.values.tensors import has_storage, tensors_in

# Of the pointwise ops in torch's own database of ops, run on its samples under 2.13, these alone have buffers where all
# tensors are of one of the dtypes below; of other dtypes a cast of an operand is a buffer.
_POINTWISE_WITH_BUFFERS = {
    "aten.gelu_backward.default",
    "aten.ldexp.Tensor",
    "aten.mvlgamma.default",
    "aten.native_dropout_backward.default",
}
_UNCAST = {torch.float32, torch.float64}
# From op to the positions of its batched arguments, the number of samples among them. Of other ops those are batched
# that have as many dimensions as the first and are as long. Kernels of norms believe their arguments: a BatchNorm of 64
# channels would write past the end of statistics that were shortened with its 64 samples.
_BATCHED = {
    "aten.convolution.default": (0,),
    "aten.convolution_backward.default": (0, 1),
    "aten.native_batch_norm_backward.default": (0, 1),
    "aten.native_group_norm.default": (0, 3),
    "aten.native_group_norm_backward.default": (0, 1, 2, 3, 5),
    "aten.native_layer_norm.default": (0,),
    "aten.native_layer_norm_backward.default": (0, 1, 3, 4),
    "aten.nll_loss_forward.default": (0, 1),
    "aten.nll_loss2d_forward.default": (0, 1),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (0, 1, 2, 3, 4, 5),
}
PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
_AFFORDABLE_BYTES = 32 * 2**20
_Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
# Candidates of a choice share most of their calls, and all batch sizes their shortened ones. Of calls that did not run
# nothing is noted: there may have been no memory for them.
_MEASURED: dict[Hashable, int] = {}


def exchanges(func: OpOverload) -> bool:
    """Whether a call hands data to other processes, for which the backend has threads of its own.

    Gloo's take up the state of the thread that calls: a watch would be written by them while it ends here.
    """
    return traits(func).pin == COLLECTIVE and func.namespace != "fsdp"  # FSDP2's own operators copy on this thread


def needs_no_workspace(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is proven to allocate nothing but its outputs on a processor.

    So are views, and pointwise ops whose tensors are of one dtype that no kernel casts.
    """
    if traits(func).view:
        return True
    if not is_plain_pointwise(func):
        return False
    dtypes = {tensor.dtype for tensor in tensors_in((*args, *kwargs.values()) if kwargs else args)}
    return len(dtypes) == 1 and dtypes <= _UNCAST


@cache
def is_plain_pointwise(func: OpOverload) -> bool:
    """Whether each element of the result is made of one element of each operand, in a single kernel."""
    known = isinstance(func, OpOverload) and torch.Tag.pointwise in func.tags
    return known and str(func) not in _POINTWISE_WITH_BUFFERS


class WatchingClock(CpuClock):
    """Times each call, and records the memory that it allocates and frees again.

    Attributes:
        watches: Whether it can record: no profiler of the user's watches this thread.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            start_watching()
            stop_watching()
        except RuntimeError:
            self.watches = False
        else:
            self.watches = True

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        """Run a call, time it, and tell its workspace."""
        if not self.watches or exchanges(func) or needs_no_workspace(func, args, kwargs):
            return super().run(func, args, kwargs)
        sizes: list[int] = []
        with _garbage_kept():
            try:
                start_watching()
            except RuntimeError:  # a profiler of the user's began within the step, or watches its backward's thread
                return super().run(func, args, kwargs)
            try:
                out, seconds, _ = super().run(func, args, kwargs)
            finally:
                sizes = stop_watching()
        return out, seconds, _peak_above_end(sizes)


@dataclass(frozen=True, slots=True)
class _Dummy:
    """Shape, strides and dtype of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Dummy:
        """The looks of a tensor, which may be fake."""
        return cls(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype)

    def at_batch(self, batch: int) -> _Dummy:
        """The same with another first dimension."""
        return _Dummy((batch, *self.shape[1:]), self.stride, self.dtype)

    def n_bytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self) -> Tensor:
        """A real tensor like it: ones, or zeros where it may be an index."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return made.fill_(1 if is_float(self.dtype) else 0)


@dataclass
class WorkspaceProbe:
    """Collects the calls of a step whose workspace could not be watched, and measures each distinct one once.

    Attributes:
        fake: Whether the step ran on fake tensors, so that full-size calls are to be avoided.
        other: Name of the other device that the step is planned for; empty where it is this processor.
        gpu: That device where it is a GPU of the table.
        unknown: The missing measurements and the reason, or the empty string.
    """

    fake: bool = False
    other: str = ""
    gpu: DeviceModel | None = None
    unknown: str = ""
    _known: dict[int, int] = field(default_factory=dict)
    _wanted: dict[int, Hashable] = field(default_factory=dict)
    _calls: dict[Hashable, _Call] = field(default_factory=dict)
    _unmeasured: dict[str, None] = field(default_factory=dict)
    _loops: dict[int, tuple[Round, WorkspaceProbe]] = field(default_factory=dict)

    def note(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Remember the call behind op ``index`` of the trace."""
        kwargs = kwargs or {}
        name = traits(func).name
        tensors = list(tensors_in((*args, *kwargs.values())))
        if func is CHUNKS and self.fake:
            self._note_loop(index, args)
        elif name in PRODUCTS and (self.other or {t.dtype for t in tensors} <= _UNCAST):
            copied = sum(t.nbytes for t in tensors if has_storage(t) and t.dim() > 1 and 1 not in t.stride()[-2:])
            if copied:
                self._known[index] = copied
        elif self.gpu is not None:
            taken = convolution_workspace_bytes(self.gpu, name, args) or chunked_loss_bytes(func, args)
            if taken:
                self._known[index] = taken
        elif not self.other and tensors and not needs_no_workspace(func, args, kwargs):
            if func is LAYER_BACKWARD or may_run_on_dummies(func, tensors):
                self._want(index, func, args, kwargs)
            else:
                self._unmeasured[name] = None

    def _note_loop(self, index: int, args: tuple[Any, ...]) -> None:
        """Remember the calls of a round of our own loop over chunks."""
        inner, places = WorkspaceProbe(self.fake, self.other, self.gpu), count()
        one = Round(args, lambda func, args, kwargs, _: inner.note(next(places), func, args, kwargs))
        self._loops[index] = one, inner

    def _want(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = tree_map_only(Tensor, _Dummy.of, (args, kwargs))
        args, kwargs = tree_map_only(torch.Generator, lambda _: None, (args, kwargs))  # it is not drawn from
        self._wanted[index] = key = _key((func, args, kwargs))
        self._calls.setdefault(key, (func, args, kwargs))

    def measure(self) -> dict[int, int]:
        """Workspace bytes by op index. Runs every distinct call once (fake: twice, at affordable batches).

        If the profiler cannot run (no memory or threads are left for it), only workspaces that need no measuring are
        returned. The same holds for another device: this processor's kernels say nothing about that device's.
        """
        for index, (one, inner) in self._loops.items():
            temps = inner.measure()
            self._unmeasured |= inner._unmeasured
            self._known[index] = max(level + temps.get(place, 0) for place, level in enumerate(one.levels))
        if self.other:
            counted = f"counted as 0: those of {self.other}'s kernels are not known"
            self.unknown = counted if self.gpu is None else MODELLED
            return self._known
        runs = {key: self._runs_of(*call) for key, call in self._calls.items()}
        try:
            taken = iter(_workspaces([call for each in runs.values() for call, _ in each]))
        except (RuntimeError, MemoryError) as error:
            self.unknown = f"not measured: {str(error).splitlines()[0]}"
            return self._known
        found: dict[Hashable, int] = {}
        for key, each in runs.items():
            parts = [(next(taken), weight) for _, weight in each]
            if any(n_bytes is None for n_bytes, _ in parts):
                self._unmeasured[traits(self._calls[key][0]).name] = None
            found[key] = max(round(sum(weight * (n_bytes or 0) for n_bytes, weight in parts)), 0)
        if self._unmeasured:
            self.unknown = f"counted as 0: those of {', '.join(self._unmeasured)} are not known"
        return {**self._known, **{index: found[key] for index, key in self._wanted.items()}}

    def _runs_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[_Call, float]]:
        """The calls to run for one call, and the weight of each one's workspace."""
        dummies = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, _Dummy)]
        full = dummies[0].shape[0] if dummies[0].shape else 1
        affordable = max(4, full * _AFFORDABLE_BYTES // max(sum(dummy.n_bytes() for dummy in dummies), 1))
        if not self.fake or full <= affordable or _must_be_whole(func, args, kwargs, full):
            return [((func, args, kwargs), 1.0)]
        half = affordable // 2
        slope = (full - half) / half
        low, high = (_at_batch(func, args, kwargs, full, batch) for batch in (half, 2 * half))
        return [(low, 1 - slope), (high, slope)]


def _must_be_whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], full: int) -> bool:
    """Whether fewer samples might contradict another argument: a state, or a number that may be that of the samples."""
    leaves = tree_flatten((args, kwargs))[0]
    counted = traits(func).name not in _BATCHED and any(type(leaf) is int and leaf == full for leaf in leaves)
    return counted or func in RECURRENT


def _at_batch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], full: int, batch: int) -> _Call:
    """The same call with fewer samples."""
    first = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, _Dummy))

    def smaller(dummy: _Dummy) -> _Dummy:
        alike = len(dummy.shape) == len(first.shape) and dummy.shape[0] == full
        return dummy.at_batch(batch) if alike else dummy

    batched = _BATCHED.get(traits(func).name)
    if batched is None:
        args, kwargs = tree_map_only(_Dummy, smaller, (args, kwargs))
    else:
        args = tuple(_shortened(a, batch) if i in batched else a for i, a in enumerate(args))
        kwargs = tree_map_only(_Dummy, smaller, kwargs)
    return func, args, kwargs


def _shortened(argument: Any, batch: int) -> Any:
    """A batched argument at another number of samples."""
    if isinstance(argument, _Dummy):
        return argument.at_batch(batch)
    return batch if isinstance(argument, int) else argument


def _key(call: _Call) -> Hashable:
    func, *arguments = call
    leaves, spec = tree_flatten(arguments)
    return func, spec, *(leaf if isinstance(leaf, _Dummy) else str(leaf) for leaf in leaves)


def _workspaces(calls: Sequence[_Call]) -> list[int | None]:
    """For each call the peak of its allocations above its result; None if it cannot run alone."""
    settings = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()
    keys = [(settings, _key(call)) for call in calls]
    new = {key: call for key, call in zip(keys, calls, strict=True) if key not in _MEASURED}
    if new:
        found = dict(zip(new, _measured(list(new.values())), strict=True))
        _MEASURED.update({key: n_bytes for key, n_bytes in found.items() if n_bytes is not None})
    return [_MEASURED.get(key) for key in keys]


def _measured(calls: Sequence[_Call]) -> list[int | None]:
    drawn = torch.get_rng_state()  # the calls draw from the generator that the step draws from
    try:
        with ThreadPoolExecutor(1) as thread:  # undisturbed by a profiler of the user's
            return thread.submit(lambda: list(map(_workspace, calls))).result()
    finally:
        torch.set_rng_state(drawn)


def _workspace(call: _Call) -> int | None:
    func = call[0]
    args, kwargs = tree_map_only(_Dummy, _Dummy.make, call[1:])
    if func is LAYER_BACKWARD:
        try:
            args = with_workspace(args)
        except RuntimeError:  # not every kernel accepts dummies
            return None
    with torch.no_grad(), _garbage_kept():
        start_watching()
        try:
            out = func(*args, **kwargs)
        except Exception:  # not every kernel accepts dummies
            out = None
            return None
        finally:
            sizes = stop_watching()
    del out
    return _peak_above_end(sizes)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Put off Python's collector: the tensors that it frees would count as a call's own releases."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _peak_above_end(sizes: Sequence[int]) -> int:
    levels = list(accumulate(sizes, initial=0))
    return max(levels) - levels[-1] if levels[-1] > 0 else max(levels)
