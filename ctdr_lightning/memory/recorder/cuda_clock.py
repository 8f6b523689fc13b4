"""Times of a GPU's kernels, and the memory that they take for themselves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ctdr_lightning.basics.gpu_memory import counts, watch_peak
from ctdr_lightning.basics.torch_private import OpOverload, keep_gpu_busy
from ctdr_lightning.memory.recorder.workspace import is_plain_pointwise
from ctdr_lightning.memory.tape.clock import Timed
from ctdr_lightning.memory.values.op_traits import may_run_twice, traits
from ctdr_lightning.memory.values.tensors import tensors_in

# About 0.2 ms on cards of 1.5 GHz: handing over an op of several kernels takes its host some 0.05 ms.
_CYCLES = 300_000
# A first call loads kernels, makes plans or tries algorithms, so it is run again; an op of many kernels takes longer to
# hand over each time.
_TRIES = (_CYCLES, _CYCLES, 8 * _CYCLES)


class _Pair:
    """Two events around a call.

    Attributes:
        key: The same for calls alike.
        waited: Whether the GPU may have waited for its host in between.
    """

    __slots__ = ("_end", "_start", "key", "waited")

    def __init__(self, key: Hashable) -> None:
        self.key, self.waited = key, False
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def begin(self, cycles: int) -> None:
        keep_gpu_busy(cycles)
        self._start.record()

    def end(self) -> None:
        self._end.record()
        self.waited = self._start.query()

    def seconds(self) -> float:
        return self._start.elapsed_time(self._end) / 1e3


class CudaClock:
    """A pair of CUDA events around each call, read after one synchronization.

    Between two events in an empty queue lies the time of the host that hands the call over. So the GPU is kept busy
    meanwhile. Where the call was handed over too late all the same it runs again, if it may, or takes the least time of
    the calls alike.

    Args:
        device: The GPU; None is the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._pairs: list[_Pair] = []
        self._least: dict[Hashable, float] | None = None

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        """Run a call between two events; the time returned is the pair's number, negative."""
        pair = _Pair(_key(func, args, kwargs))
        may_repeat, out, temp_bytes = may_run_twice(func, args, kwargs), None, 0
        for cycles in _TRIES:
            out = None  # of the try before
            out, temp_bytes = self._try(pair, cycles, func, args, kwargs)
            if not (pair.waited and may_repeat):
                break
        self._pairs.append(pair)
        return out, -float(len(self._pairs)), temp_bytes

    def _try(
        self, pair: _Pair, cycles: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int]:
        plain = traits(func).view or is_plain_pointwise(func)  # a GPU casts operands within the kernel
        before = 0 if plain else watch_peak(self._device).allocated
        pair.begin(cycles)
        out = func(*args, **kwargs)
        pair.end()
        after = None if plain else counts(self._device)
        return out, after.allocated_peak - max(before, after.allocated) if after is not None else 0

    def seconds(self, measured: float) -> float:
        """Seconds between a pair of events; of a call that raised an error, or ran before this clock, as measured."""
        if measured >= 0:
            return measured
        if self._least is None:
            self._least = self._read()
        pair = self._pairs[-int(measured) - 1]
        return self._least.get(pair.key, 0.0) if pair.waited else pair.seconds()

    def _read(self) -> dict[Hashable, float]:
        """The least time of each kind of call: of those for which the GPU did not wait, if there are any."""
        torch.cuda.synchronize(self._device)
        found: dict[Hashable, float] = {}
        for pair in sorted(self._pairs, key=lambda pair: (pair.waited, pair.seconds())):
            found.setdefault(pair.key, pair.seconds())
        return found


def _key(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    return func, tuple((tuple(t.shape), t.dtype) for t in tensors_in((*args, *kwargs.values())))
