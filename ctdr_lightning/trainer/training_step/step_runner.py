"""Puts each training step under the memory plan and beside the teacher, and leaves the module as it found it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ctdr_lightning.memory import Session, signature_of
from ctdr_lightning.memory.values.live_bytes import tell_trackers
from ctdr_lightning.trainer.modules import has_compiled_step
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.patches import LogCalls, Patches, hide_bookkeeping
from ctdr_lightning.trainer.training_step.resident import resident_tensors, waiting_tensors
from ctdr_lightning.trainer.training_step.retry import Retry
from ctdr_lightning.trainer.training_step.step_in_backward import StepInBackward
from ctdr_lightning.trainer.training_step.sub_batches import SubBatches

_WRAPPED = ("training_step", "backward")


class StepRunner:
    """Wraps ``training_step`` and ``backward`` as instance attributes between `attach` and `release`.

    Args:
        in_backward: Updates parameters inside the backward, where that is asked for.

    Attributes:
        session: Guards the memory of each step; None leaves it alone.
        wrap_step: Runs the step and may change its output, as distillation does; None calls it directly.
        signature_extra: What makes steps differ besides their batch, such as the phase.
        sub_batches: Cuts each batch into smaller ones; None runs it whole.
        prepares: Called before each step with its arguments, what tells its kind, and whether it is a later part of a
            batch, where there is a session; returns the bytes that are in memory beside the session's own, and whether
            the backward will add to gradients that stand.
        copies: Told before each step the bytes of the copies that stand beside it to put a failed try back.
        metering: Whether the next batch's true peak is measured.
        counting: Whether the next step's operations are counted.
        step_flops: Operations of the last step that was counted; 0 before.
        tighten: Called with the message of an out-of-memory error, before the step is tried again; None tries no second
            time.
        measured: The last batch whose true peak was measured; None before.
    """

    def __init__(self, in_backward: StepInBackward) -> None:
        self._in_backward = in_backward
        self.session: Session | None = None
        self.wrap_step: Callable[[nn.Module, Callable[[], Any]], Any] | None = None
        self.signature_extra: Hashable = None
        self.sub_batches: SubBatches | None = None
        self.prepares: Callable[[Any, Callable[[bool], Hashable], bool], tuple[int, bool]] | None = None
        self.copies: Callable[[int], None] | None = None
        self.metering = False
        self.counting = False
        self.step_flops = 0
        self.tighten: Callable[[str], None] | None = None
        self.measured: BatchMeter | None = None
        self._counter: FlopCounterMode | None = None
        self._meter: BatchMeter | None = None
        self._module: LightningModule | None = None
        self._patches = Patches()
        self._retry: Retry | None = None
        self._beside = (0, False)
        self._kind: Hashable = None
        self._later = False

    def attach(self, module: LightningModule) -> None:
        """Wrap the module's step; twice is once. A compiled step is left alone: its ops are not seen."""
        if self._module is module:
            return
        self._module = module
        if has_compiled_step(module):
            return
        for name, run in zip(_WRAPPED, (self._run, self._backward), strict=True):
            self._patches.put(module, name, functools.partial(functools.partial, run, module))
        if self.session is not None:
            calls = LogCalls()
            hide_bookkeeping(self._patches, module, calls)
            if self.tighten is not None:
                self._retry = Retry(self.session, self._abort, self.tighten, calls)
        if self.sub_batches is not None:
            self._patches.put(module, "log", self.sub_batches.logs.kept_back)
        self._in_backward.unseen = self.session.unseen if self.session is not None else None
        self._in_backward.begins = self._retry.optimizer_begins if self._retry is not None else None

    def release(self) -> None:
        """Undo `attach` and end a step that is under way."""
        self._abort()
        if self.sub_batches is not None:
            self.sub_batches.release()
        self._retry = None
        self._module = None
        self._patches.undo()

    def backward_done(self) -> None:
        """The backward is over, the optimizer's step may follow; may be called more than once."""
        if self._module is None:
            return
        self._part_done()
        self._stop_counter()
        if self._meter is not None:
            self._meter.backward_done()

    def batch_done(self) -> BatchMeter | None:
        """The batch is over, the optimizer's step with it. Returns what was measured of it, where it was."""
        self.backward_done()
        return self._stop_meter()

    def _run(self, module: LightningModule, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        one = functools.partial(self._one, module)
        if self.sub_batches is None:
            return one(inner, (args, kwargs))
        return self.sub_batches.run(module, inner, one, self._part_done, self.signature_extra, (args, kwargs))

    def _one(
        self,
        module: LightningModule,
        inner: Callable[..., Any],
        inputs: Any,
        finish: Callable[[Any], Any] | None = None,
        later: bool = False,
    ) -> Any:
        """One step, of a batch or of a part of it: ``later`` of a part that comes after another."""
        self._later = later
        if self.prepares is not None and self.session is not None:  # before the retry takes hold of gradients
            alike = signature_of(inputs, module)
            self._beside = self.prepares(inputs, lambda adds: (self.signature_extra, adds, alike), later)
            self._kind = (self.signature_extra, self._beside[1], alike)
        args, kwargs = inputs
        run = functools.partial(self._forward, module, functools.partial(inner, *args, **kwargs), inputs, finish)
        return run() if self._retry is None else self._retry.forward(module, run, inputs)

    def _part_done(self) -> None:
        """The backward of a batch, or of a part of it, is over."""
        if self._retry is not None:
            self._retry.done()
        if self.session is not None:
            self.session.end()

    def _forward(
        self, module: LightningModule, inner: Callable[[], Any], inputs: Any, finish: Callable[[Any], Any] | None
    ) -> Any:
        step = inner if self.wrap_step is None else functools.partial(self.wrap_step, module, inner)
        self._begin(module, inputs)
        try:
            output = step() if finish is None else finish(step())
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
            if self.session is not None:
                self.session.backward_begins(loss)
            with self._in_backward.backward():
                inner(loss, *args, **kwargs)

        if self.sub_batches is not None:
            self.sub_batches.put_gradients_back()
        if self._retry is None:
            run(loss)
        else:
            self._retry.backward(module, run, loss)

    def _begin(self, module: LightningModule, inputs: Any) -> None:
        beside_bytes = self._beside[0]
        if self._retry is not None:
            beside_bytes += self._retry.copied_bytes
            if self.copies is not None:
                self.copies(self._retry.copied_bytes)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self._abort_step(batch=not self._later)
        if self.metering and self._meter is None:  # below all others, as it leaves last
            optimizers = module.trainer.optimizers
            passing = [
                *gradients,
                *(self._retry.copies if self._retry is not None else ()),
                *waiting_tensors(optimizers),
            ]
            self._meter = BatchMeter(resident_tensors(module, optimizers, inputs), passing)
        if self.counting and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        if self.session is not None:
            self.session.begin(self._kind, beside_bytes=beside_bytes)
        if self.metering:
            tell_trackers(gradients)

    def _abort(self) -> None:
        self._abort_step(batch=True)

    def _abort_step(self, *, batch: bool) -> None:
        """Leave what a step has installed; of its batch too, or of that part alone."""
        if self.session is not None:
            self.session.abort()
        if batch:
            self._stop_counter()
            self._stop_meter()

    def _stop_counter(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self.step_flops, self.counting = counter.get_total_flops(), False

    def _stop_meter(self) -> BatchMeter | None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.done()
            self.measured = meter
        return meter
