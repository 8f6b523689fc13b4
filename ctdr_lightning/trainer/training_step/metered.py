"""The layer that measures: the true peak of a batch, and the operations of a step."""

from __future__ import annotations

from typing import Any

from ctdr_lightning.basics.nests import tensors_of
from ctdr_lightning.basics.torch_private import OpMode, OpOverload
from ctdr_lightning.memory.holders.optimizer_state_tensors import state_tensors
from ctdr_lightning.memory.values.live_bytes import tell_trackers
from ctdr_lightning.memory.values.op_seconds import op_flops
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.layers import Chain, Layer, Step
from ctdr_lightning.trainer.training_step.optimizer.resident import waiting_tensors


class OperationCounter(OpMode):
    """Counts the operations of the ops that run while it is entered, and changes none.

    torch's ``FlopCounterMode`` runs an op that it does not know in parts: on a GPU a fused RMSNorm was rounded
    differently. Its hooks on modules refuse ``torch.autograd.grad`` within a step.

    Attributes:
        total: Operations so far.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += op_flops(func, args, kwargs or {}, out)
        return out


class Metered(Layer):
    """Measures the batches that it is asked to.

    Attributes:
        metering: Whether the present batch's true peak is measured.
        step_flops: Operations of the last step that was counted; 0 before.
        measured: The last batch whose true peak was measured; None before.
    """

    def __init__(self) -> None:
        self.metering = self._counting = False
        self.step_flops = 0
        self.measured: BatchMeter | None = None
        self._counter: OperationCounter | None = None
        self._meter: BatchMeter | None = None

    def batch_begins(self, *, metered: bool) -> None:
        """A batch begins; ``metered``: whether its true peak is measured."""
        self.metering = metered

    def count_next(self) -> None:
        """Count the operations of the next step."""
        self._counting = True

    def forward(self, step: Step, rest: Chain) -> Any:
        """Start the meters below everything that the rest installs."""
        rest.leave()
        if self.metering:
            self._start_meter(step)
        if self._counting and self._counter is None:
            self._counter = OperationCounter()
            self._counter.__enter__()
        try:
            return rest.forward(step)
        except BaseException:
            self.leave()
            raise

    def _start_meter(self, step: Step) -> None:
        module, optimizers = step.module, step.module.trainer.optimizers
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        passing = [*gradients, *step.copies, *state_tensors(optimizers), *waiting_tensors(optimizers)]
        if self._meter is None:
            standing = (*module.parameters(), *module.buffers(), *tensors_of(step.inputs))
            self._meter = BatchMeter(standing, passing)
        elif not step.later:  # the optimizer runs the step again, as its closure
            self._meter.step_begins(passing)

    def backward_done(self) -> None:
        """The backward of a batch is over; may be called more than once."""
        self._stop_counter()
        if self._meter is not None:
            self._meter.backward_done()

    def batch_done(self) -> BatchMeter | None:
        """The batch is over. Returns its measurement; None where it was not measured."""
        return self._stop_meter()

    def leave(self) -> None:
        """Stop the meters."""
        self._stop_counter()
        self._stop_meter()

    def _stop_counter(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self.step_flops, self._counting = int(counter.total), False

    def _stop_meter(self) -> BatchMeter | None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.done()
            self.measured = meter
        return meter


class Tracked(Layer):
    """Tells the meters and the recorder, once all are there, of gradients that a step may free.

    Args:
        metered: Knows whether the batch is measured.
    """

    def __init__(self, metered: Metered) -> None:
        self._metered = metered

    def forward(self, step: Step, rest: Chain) -> Any:
        """Note the present gradients."""
        if self._metered.metering:
            tell_trackers([p.grad for p in step.module.parameters() if p.grad is not None])
        return rest.forward(step)
