"""A batch run as several smaller ones, with the gradients and the loss of the whole: moDNN's sub-batches.

The forward and backward of all sub-batches but the last run inside ``training_step``, before Lightning frees the
gradients of the step before. So what they leave is set aside, and put back when the last one's backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.memory import signature_of
from ctdr_lightning.trainer.training_step.batch_parts import Part, n_samples, parts_of
from ctdr_lightning.trainer.training_step.joined import JoinedLogs, detached_output, joined_output
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.retry import loss_of
from ctdr_lightning.trainer.training_step.sub_batch_checks import (
    batch_norm_of,
    check_mean,
    computes_in_half,
    sub_batch_hindrance,
)

Step = Callable[..., Any]
_HINT = "Leave sub_batches out, or take away what stands in its way."


class SubBatches:
    """Cuts the batches of a run.

    Args:
        asked: How many sub-batches each batch has; ``"auto"`` for the fewest that fit the budget.
        memory: Knows how many these are.

    Attributes:
        logs: What sub-batches have logged.
    """

    def __init__(self, asked: int | str, memory: MemoryStage) -> None:
        self._asked, self._memory = asked, memory
        self.logs = JoinedLogs()
        self._numbers: dict[Hashable, int] = {}
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._checked = False

    def check(self, trainer: Any, module: LightningModule) -> None:
        """Refuse a run whose batches cannot be cut.

        Raises:
            ConfigError: Naming what stands in the way.
        """
        reason = sub_batch_hindrance(trainer, module)
        if reason:
            raise ConfigError(f"sub_batches={self._asked!r} cannot be: {reason}.", _HINT)

    def release(self) -> None:
        """Leave a batch that is under way."""
        self.logs.close()
        self._held = []

    def run(
        self, module: LightningModule, inner: Step, one: Step, done: Callable[[], None], extra: Hashable, inputs: Any
    ) -> Any:
        """Run ``training_step`` on a batch.

        Args:
            module: The model.
            inner: Its ``training_step``.
            one: Runs a step as the whole batch's would be; from the step, its arguments, what to do with its output,
                and whether its backward will add to gradients of the same batch.
            done: Called after the backward of a sub-batch that is not the last.
            extra: What makes steps differ besides their batch.
            inputs: The arguments of the step.

        Returns:
            What the step returns, for the whole batch; its loss leads back to the last sub-batch alone.

        Raises:
            ConfigError: When the batch cannot be cut, or its loss is no mean over samples.
        """
        number = self._number(module, inner, extra, inputs)
        if number < 2:
            return one(inner, inputs)
        try:
            return self._in_parts(module, inner, one, done, inputs, parts_of(inputs[0][0], number))
        finally:
            self.logs.close()

    def put_gradients_back(self) -> None:
        """The last sub-batch's backward begins: it adds to the gradients of the others."""
        held, self._held = self._held, []
        for parameter, gradient in held:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _in_parts(
        self, module: LightningModule, inner: Step, one: Step, done: Callable[[], None], inputs: Any, parts: list[Part]
    ) -> Any:
        joined = _Joined([part.share for part in parts], self.logs)
        (_, *more), named = inputs
        _free_gradients(module)
        for index, part in enumerate(parts):
            step = partial(self._logged, index, inner)
            output = one(step, ((part.batch, *more), named), partial(joined.take, index), index > 0)
            if output is None:  # Lightning skips such a batch
                self.logs.tell(joined.shares)
                _free_gradients(module)
                return None
            if index + 1 < len(parts):
                _backward(module, output)
                del output
                done()
        self._held = _taken(module)
        return output

    def _logged(self, index: int, inner: Step, *args: Any, **kwargs: Any) -> Any:
        self.logs.begin(index)
        return inner(*args, **kwargs)

    def _number(self, module: LightningModule, inner: Step, extra: Hashable, inputs: Any) -> int:
        kind = (signature_of(inputs, module), extra, self._memory.limits)
        if kind not in self._numbers:
            self._numbers[kind] = self._decided(module, inner, inputs)
        return self._numbers[kind]

    def _decided(self, module: LightningModule, inner: Step, inputs: Any) -> int:
        """How many sub-batches a kind of batch has, once it is known that it can be cut."""
        n = n_samples(inputs[0][0] if inputs[0] else None)
        if n < 2 and not self._numbers and self._asked != "auto":
            raise ConfigError(f"sub_batches={self._asked!r} cannot be: the batch has {n} sample.", _HINT)
        number = min(self._asked, n) if isinstance(self._asked, int) else self._memory.fewest_sub_batches(inputs)
        if number > 1:
            self._check_batch(module, inner, inputs)
            self._memory.say(f"Batches of {n} samples run as {number} sub-batches of {-(-n // number)} or less")
        return number

    def _check_batch(self, module: LightningModule, inner: Step, inputs: Any) -> None:
        found = batch_norm_of(module)
        if found:
            raise ConfigError(
                f"sub_batches={self._asked!r} cannot be: {found} normalises each sample by its whole batch.",
                "Use GroupNorm or LayerNorm, put it in evaluation mode, or leave sub_batches out.",
            )
        if self._checked:
            return
        (batch, *more), named = inputs
        half = computes_in_half(module.device.type, module.parameters())
        try:
            self.logs.begin(0)
            reason = check_mean(module, lambda few: inner(few, *more, **named), batch, half=half)
        finally:
            self.logs.close()
        self._checked = True
        if reason:
            rank_zero_warn(
                f"CTDR: whether the loss is a mean over samples could not be checked: {reason}. Only where it is, "
                "sub-batches have the gradients of the whole batch."
            )


class _Joined:
    """What the sub-batches of one batch have returned."""

    def __init__(self, shares: list[float], logs: JoinedLogs) -> None:
        self.shares, self._logs = shares, logs
        self._sums: list[Tensor] = []
        self._outputs: list[tuple[float, Any]] = []

    def take(self, index: int, output: Any) -> Any:
        """Note what a sub-batch has returned, or returned when it was run again.

        Returns:
            The loss up to here, which leads back to this sub-batch alone, so that all have one graph; of the last one,
            what the whole batch's step would return.
        """
        del self._sums[index:], self._outputs[index:]
        loss = loss_of(output)
        if loss is None:
            return None
        part = self.shares[index] * loss
        with no_dispatch_modes():
            before = self._sums[-1] if self._sums else torch.zeros_like(part)
            self._sums.append(before + part.detach())
        self._outputs.append((self.shares[index], detached_output(output)))
        so_far = part + before
        if index + 1 < len(self.shares):
            return so_far
        self._logs.tell(self.shares)
        return joined_output(self._outputs, so_far)


def _free_gradients(module: LightningModule) -> None:
    for optimizer in module.trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)


def _taken(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """The gradients, which Lightning would free otherwise."""
    held = [(parameter, parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    return held


def _backward(module: LightningModule, loss: Tensor) -> None:
    """A backward as the trainer runs it: outside of autocast, the loss divided and scaled as it would be."""
    trainer: Any = module.trainer
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    loss = loss / trainer.accumulate_grad_batches  # by 1, but a graph without it would be another kind of step
    torch.clear_autocast_cache()
    with torch.autocast(module.device.type, enabled=False):
        module.backward(loss if scaler is None else scaler.scale(loss))
