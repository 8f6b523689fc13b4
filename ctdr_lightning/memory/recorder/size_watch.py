"""The bytes and seconds of a foreseen step, seen while it runs under its plan, for much less than recording takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpMode, OpOverload
from ctdr_lightning.memory.recorder.cuda_clock import CudaClock
from ctdr_lightning.memory.recorder.workspace import WatchingClock
from ctdr_lightning.memory.traces.foreseen import FORESEEN, with_sizes
from ctdr_lightning.memory.traces.trace import OpRecord, Trace
from ctdr_lightning.memory.values.op_traits import traits, without_running_stats
from ctdr_lightning.memory.values.tensors import has_storage, tensors_in

_DETACH = torch.ops.aten.detach.default
_DETACH_NAME = str(_DETACH)


class SizeWatch(OpMode):
    """Sees the ops of a step that runs as foreseen, forward and backward, and notes the sizes of their outputs.

    Args:
        trace: The foreseen step.

    Attributes:
        resting: Whether ops outside of the step run.
    """

    supports_higher_order_operators = True  # as for a `Recorder`

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.resting = False
        self._trace, self._ops, self._at = trace, trace.ops, 0
        self._shapes = [value.shape for value in trace.values]
        self._n_bytes = [storage.n_bytes for storage in trace.storages]
        self._clock = CudaClock() if trace.device == "cuda" else WatchingClock()
        self._seconds: dict[int, float] = {}  # by the op's index
        self._temp_bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = None if self.resting or func.namespace == "prim" else self._next(func)
        if op is None:
            return func(*args, **kwargs)
        at = self._at - 1
        self._note_inputs(op, func, args, kwargs)
        out, self._seconds[at], temp_bytes = self._clock.run(func, args, kwargs)
        if not (isinstance(self._clock, WatchingClock) and not self._clock.watches):
            self._temp_bytes[at] = temp_bytes
        self._note_outputs(op, out)
        return out

    def _next(self, func: OpOverload) -> OpRecord | None:
        """The op of the trace that runs; None for one of autograd's, of a codec's or of the tape's own."""
        if func is not _DETACH:
            self._skip_detaches()
        if self._at < len(self._ops) and self._ops[self._at].name == traits(func).name:
            self._at += 1
            return self._ops[self._at - 1]
        return None

    def _skip_detaches(self) -> None:
        """Autograd detaches some tensors that it saves itself, with a tape and without one at other times."""
        while self._at < len(self._ops) and self._ops[self._at].name == _DETACH_NAME:
            self._at += 1

    def _note_inputs(self, op: OpRecord, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if traits(func).batch_norm:
            args = without_running_stats(func, args, kwargs)
        found = {t.untyped_storage()._cdata: t for t in tensors_in((*args, *kwargs.values())) if has_storage(t)}
        if len(found) == len(op.inputs):
            self._note(zip(op.inputs, found.values(), strict=True), made=False)

    def _note_outputs(self, op: OpRecord, out: Any) -> None:
        outs = out if type(out) in (tuple, list) else (out,)
        strided = ((v, t) for v, t in zip(op.outputs, outs, strict=False) if isinstance(t, Tensor) and has_storage(t))
        self._note(strided, made=True)

    def _note(self, pairs: Iterable[tuple[int, Tensor]], *, made: bool) -> None:
        for value, tensor in pairs:
            if value >= 0:
                record = self._trace.values[value]
                known = self._trace.storages[record.storage]
                if known.born >= 0 or known.n_bytes:  # gathered weights are records of their own, of a fixed size
                    self._n_bytes[record.storage] = tensor.untyped_storage().nbytes()
                if made and record.op >= 0 and record.op == self._at - 1:
                    self._shapes[value] = tuple(map(int, tensor.shape))

    def trace(self) -> Trace | None:
        """The step with the sizes that were seen; None where another one ran."""
        self._skip_detaches()
        if self._at < len(self._ops):
            return None
        known, clock = self._trace, self._clock
        seconds = [
            clock.seconds(self._seconds[i]) if i in self._seconds else op.seconds for i, op in enumerate(self._ops)
        ]
        shares = {i: op.replay_share for i, op in enumerate(self._ops)}
        seen = with_sizes(known, self._shapes, self._n_bytes)
        seen = seen.with_costs(seconds, self._temp_bytes, known.python_s_per_replay, shares)
        return replace(seen, meta={note: why for note, why in seen.meta.items() if note != FORESEEN})
