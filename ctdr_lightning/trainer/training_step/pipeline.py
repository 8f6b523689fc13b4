"""The training step of a run: ``training_step`` and ``backward`` with all layers around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from ctdr_lightning.trainer.accuracy.coach import Coach
from ctdr_lightning.trainer.modules import compiled_anew, has_compiled_step
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.guided import Guided, Lean, Planned, Taught, Unguided, Updating
from ctdr_lightning.trainer.training_step.layers import Chain, Layer, Step
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.metered import Metered, Tracked
from ctdr_lightning.trainer.training_step.optimizer.in_backward import StepInBackward
from ctdr_lightning.trainer.training_step.patches import LogCalls, Patches, hide_bookkeeping
from ctdr_lightning.trainer.training_step.retry.retry import Retry
from ctdr_lightning.trainer.training_step.sub_batches.sub_batches import SubBatches


class StepRunner:
    """Wraps ``training_step`` and ``backward`` as instance attributes between `attach` and `release`.

    Args:
        memory: Plans the steps.
        in_backward: Updates parameters inside the backward, where that is asked for.
        sub_batches: Cuts each batch into smaller ones; None runs it whole.
        coach: Has the teacher; None without recovery.
        retries: Whether a step that ran out of memory is tried again.

    Attributes:
        meters: Measures batches.
    """

    def __init__(
        self,
        memory: MemoryStage,
        in_backward: StepInBackward,
        sub_batches: SubBatches | None = None,
        coach: Coach | None = None,
        *,
        retries: bool = True,
    ) -> None:
        self._memory, self._in_backward, self._sub_batches = memory, in_backward, sub_batches
        self._coach, self._retries = coach, retries
        self.meters = Metered()
        self._module: LightningModule | None = None
        self._patches = Patches()
        self._chain = Chain(())

    def attach(self, module: LightningModule) -> None:
        """Wrap the module's step; twice is once. A compiled step is compiled anew where there is a budget."""
        if self._module is module:
            return
        self._module = module
        if has_compiled_step(module):
            backend = self._memory.backend_of(module)
            if backend is not None:
                self._patches.put(module, "training_step", lambda step: compiled_anew(step, backend))
            for name in ("log", "log_dict"):  # they ask for the signature of training_step, on which Dynamo fails
                self._patches.put(module, name, torch.compiler.disable)
            return
        for name, run in (("training_step", self._run), ("backward", self._backward)):
            self._patches.put(module, name, functools.partial(functools.partial, run, module))
        calls = LogCalls()
        if self._memory.session is not None:
            hide_bookkeeping(self._patches, module, calls)
        if self._sub_batches is not None:
            self._patches.put(module, "log", self._sub_batches.logs.kept_back)
        self._chain = Chain(self._layers(calls))

    def _layers(self, calls: LogCalls) -> list[Layer]:
        """The layers around a step, outermost first."""
        session, coach, memory = self._memory.session, self._coach, self._memory
        retry = Retry(session, memory, calls) if session is not None and self._retries else None
        teacher = coach.around if coach is not None else None
        layers: list[Layer | None] = [
            self._sub_batches,
            Lean(memory) if session is not None else None,
            Planned(memory) if session is not None else None,
            retry,
            self.meters,
            Guided(memory, session) if session is not None else Unguided(),
            Tracked(self.meters),
            Taught(teacher) if teacher is not None else None,
            Updating(self._in_backward, session, retry.optimizer_begins if retry is not None else None),
        ]
        return [layer for layer in layers if layer is not None]

    def release(self) -> None:
        """Undo `attach` and end a step that is under way."""
        self._chain.leave()
        self._chain = Chain(())
        self._module = None
        self._patches.undo()

    def backward_done(self) -> None:
        """The backward is over, the optimizer's step may follow; may be called more than once."""
        if self._module is not None:
            self._chain.done()
            self.meters.backward_done()

    def batch_done(self) -> BatchMeter | None:
        """The batch is over, the optimizer's step with it. Returns its measurement; None where it was not measured."""
        self.backward_done()
        return self.meters.batch_done()

    def _run(self, module: LightningModule, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = self._coach.key if self._coach is not None else None
        return self._chain.forward(Step(module, inner, (args, kwargs), key))

    def _backward(
        self, module: LightningModule, inner: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        self._chain.backward(loss, lambda loss: inner(loss, *args, **kwargs))
