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
from ctdr_lightning.trainer.training_step import retry as rescue
from ctdr_lightning.trainer.training_step.patches import Patches, hide_bookkeeping

_WRAPPED = ("training_step", "backward")


class StepEngine:
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
        self._before: rescue.Before | None = None
        self._repeat: Callable[[], Any] | None = None
        self._loss: Tensor | None = None

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
            hide_bookkeeping(self._patches, module)

    def release(self) -> None:
        """Undo `attach` and end a step that is under way."""
        self._abort()
        self._before = self._repeat = self._loss = None
        self._module = None
        self._patches.undo()

    def backward_done(self) -> None:
        """The backward is over; may be called more than once."""
        if self._module is None:
            return
        if self.session is not None:
            self.session.end()
        self._stop_meter()

    def _run(self, module: LightningModule, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(self._forward, module, functools.partial(inner, *args, **kwargs), (args, kwargs))
        if self.tighten is None or self.session is None:
            return run()
        self._before, self._repeat = rescue.Before(module), run
        output = self._insist(run)
        loss = rescue.loss_of(output)
        self._loss = loss.detach().clone() if loss is not None else None
        return output

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

    def _insist(self, run: Callable[[], Any]) -> Any:
        for _ in range(rescue.MAX_TRIES - 1):
            output, message = rescue.attempt(run)
            if not message:
                return output
            self._give_way(message)
        return run()

    def _give_way(self, message: str) -> None:
        assert self._before is not None
        assert self.tighten is not None
        self._abort()
        self._before.put_back()
        self.tighten(message)

    def _backward(
        self, module: LightningModule, inner: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        repeat, before, old = self._repeat, self._before, self._loss
        if repeat is None or before is None or old is None or before.had_gradients or module.trainer.world_size > 1:
            inner(loss, *args, **kwargs)
            return
        given = loss.detach().clone()
        for _ in range(rescue.MAX_TRIES):
            _, message = rescue.attempt(functools.partial(inner, loss, *args, **kwargs))
            if not message:
                return
            rescue.free([loss])
            self._give_way(message)
            with rescue.unheard(module):
                again = rescue.loss_of(self._insist(repeat))
            assert again is not None
            loss = rescue.scaled_like(again, old, given)
            del again
        inner(loss, *args, **kwargs)

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
