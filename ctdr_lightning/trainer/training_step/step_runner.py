"""Puts each training step under the memory plan and beside the teacher, and leaves the module as it found it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ctdr_lightning.memory import Session, signature_of
from ctdr_lightning.memory.values.live_bytes import PeakMeter, tell_trackers
from ctdr_lightning.trainer.modules import is_compiled
from ctdr_lightning.trainer.training_step.patches import LogCalls, Patches, hide_bookkeeping
from ctdr_lightning.trainer.training_step.retry import Retry

_WRAPPED = ("training_step", "backward")


class StepRunner:
    """Wraps ``training_step`` and ``backward`` as instance attributes between `attach` and `release`.

    Attributes:
        session: Guards the memory of each step; None leaves it alone.
        around: Runs the step and may change its output, as distillation does; None calls it directly.
        key: What makes steps differ besides their batch, such as the phase.
        metering: Whether the next step's true peak is measured.
        counting: Whether the next step's operations are counted.
        step_flops: Operations of the last step that was counted; 0 before.
        tighten: Called with the message of an out-of-memory error, before the step is tried again; None tries no second
            time.
        peak_bytes: The last measured peak of a step, resident tensors aside; 0 before the first.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.around: Callable[[nn.Module, Callable[[], Any]], Any] | None = None
        self.key: Hashable = None
        self.metering = False
        self.counting = False
        self.step_flops = 0
        self._counter: FlopCounterMode | None = None
        self.tighten: Callable[[str], None] | None = None
        self._measured_bytes = 0
        self._meter: PeakMeter | None = None
        self._module: LightningModule | None = None
        self._patches = Patches()
        self._retry: Retry | None = None

    @property
    def peak_bytes(self) -> int:
        """The last measured peak of a step, without what was in memory before it."""
        return self.session.measured_peak_bytes if self.session is not None else self._measured_bytes

    def attach(self, module: LightningModule) -> None:
        """Wrap the module's step; twice is once. A compiled step is left alone: its ops are not seen."""
        if self._module is module:
            return
        self._module = module
        if is_compiled(module):
            return
        for name, run in zip(_WRAPPED, (self._run, self._backward), strict=True):
            self._patches.put(module, name, functools.partial(functools.partial, run, module))
        if self.session is not None:
            calls = LogCalls()
            hide_bookkeeping(self._patches, module, calls)
            self._retry = Retry(self.session, self.tighten, calls) if self.tighten is not None else None

    def release(self) -> None:
        """Undo `attach` and end a step that is under way."""
        self._abort()
        self._retry = None
        self._module = None
        self._patches.undo()

    def backward_done(self) -> None:
        """The backward is over; may be called more than once."""
        if self._module is None:
            return
        if self._retry is not None:
            self._retry.done()
        if self.session is not None:
            self.session.end()
        self._stop_meter()

    def _run(self, module: LightningModule, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = (args, kwargs)
        run = functools.partial(self._forward, module, functools.partial(inner, *args, **kwargs), inputs)
        return run() if self._retry is None else self._retry.forward(module, run, inputs)

    def _forward(self, module: LightningModule, inner: Callable[[], Any], inputs: Any) -> Any:
        step = inner if self.around is None else functools.partial(self.around, module, inner)
        self._begin(module, inputs)
        try:
            output = step()
        except BaseException:
            self._abort()
            raise
        if self.session is not None:
            self.session.forward_done()
        return output

    def _backward(
        self, module: LightningModule, inner: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        def run(loss: Tensor) -> None:
            inner(loss, *args, **kwargs)

        if self._retry is None:
            run(loss)
        else:
            self._retry.backward(module, run, loss)

    def _begin(self, module: LightningModule, inputs: Any) -> None:
        if self.counting:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        if self.session is not None:
            self.session.begin((self.key, signature_of(inputs, module)), meter=self.metering)
        elif self.metering:
            self._meter = PeakMeter()
            self._meter.__enter__()
        if self.metering:
            tell_trackers(parameter.grad for parameter in module.parameters() if parameter.grad is not None)

    def _abort(self) -> None:
        if self.session is not None:
            self.session.abort()
        self._stop_meter()

    def _stop_meter(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self.step_flops, self.counting = counter.get_total_flops(), False
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.__exit__(None, None, None)
            self._measured_bytes = meter.live.peak
