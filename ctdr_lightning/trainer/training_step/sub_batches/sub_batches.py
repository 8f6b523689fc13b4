"""A batch run as several smaller ones, with the gradients and the loss of the whole: moDNN's sub-batches.

The forward and backward of all sub-batches but the last run inside ``training_step``, before Lightning frees the
gradients of the step before. So their gradients are set aside, and added when the last one's backward begins. In later
batches of an accumulation Lightning frees nothing, and all sub-batches add to the gradients that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.torch_private import no_dispatch_modes
from ctdr_lightning.memory import signature_of
from ctdr_lightning.trainer.training_step.events import BatchesCut
from ctdr_lightning.trainer.training_step.layers import Backward, Chain, Layer, Step, loss_of
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.optimizer.resident import begins_sum
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import LEAST_ASKED, RunningStatistics, batch_norm_of
from ctdr_lightning.trainer.training_step.sub_batches.checks import (
    check_mean,
    computes_in_half,
    set_otherwise,
    sub_batch_hindrance,
)
from ctdr_lightning.trainer.training_step.sub_batches.joined import JoinedLogs, detached_output, joined_output
from ctdr_lightning.trainer.training_step.sub_batches.own_changes import OwnChanges
from ctdr_lightning.trainer.training_step.sub_batches.parts import Part, n_samples, parts_of

Run = Callable[..., Any]
_HINT = "Leave sub_batches out, or remove the obstacle."


class SubBatches(Layer):
    """Cuts the batches of a run.

    Args:
        asked: How many sub-batches each batch has; ``"auto"`` for the fewest that fit the budget.
        memory: Knows how many these are.
        batch_norm: Whether BatchNorm may normalise each part by itself.
        refusal: Raised in the place of an obstacle, where nobody asked for sub-batches.

    Attributes:
        logs: Logs of the sub-batches.
    """

    def __init__(
        self, asked: int | str, memory: MemoryStage, *, batch_norm: bool, refusal: InfeasibleBudgetError | None
    ) -> None:
        self._asked, self._memory, self._batch_norm, self._refusal = asked, memory, batch_norm, refusal
        self.logs = JoinedLogs()
        self._numbers: dict[Hashable, int] = {}
        self._last: Hashable = None
        self._n_too_large = 0
        self._outgrown: set[Hashable] = set()
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._statistics: RunningStatistics | None = None
        self._own: OwnChanges | None = None
        self._watched, self._n_runs = False, 0

    def check(self, trainer: Any, module: LightningModule) -> None:
        """Refuse a run whose batches cannot be split.

        Raises:
            ConfigError: With the obstacle.
        """
        reason = sub_batch_hindrance(trainer, module)
        if reason:
            raise ConfigError(f"sub_batches={self._asked!r} is not supported here: {reason}.", _HINT)

    def leave(self) -> None:
        """Leave a batch that is under way."""
        self.logs.close()
        self._held = []
        self._end_statistics()

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run ``training_step`` on a batch, in parts.

        Args:
            step: The whole batch's.
            rest: Runs a part as the whole batch would be.

        Returns:
            The step's result for the whole batch; its loss leads back to the last sub-batch alone.

        Raises:
            ConfigError: If the batch cannot be cut, its loss is no mean over samples, the step changes a buffer as the
                check did not see, or a later part of a batch that adds to gradients of others has no loss.
        """
        number = self._number(step)
        if number < 2:
            return rest.forward(step)
        try:
            return self._in_parts(step, rest, parts_of(step.inputs[0][0], number))
        finally:
            self.logs.close()
            if self._own is not None:
                self._own.forget()

    def backward(self, loss: Tensor, rest: Backward) -> None:
        """The last sub-batch's backward adds to the gradients of the others."""
        with torch.no_grad():
            while self._held:
                parameter, gradient = self._held.pop()
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                del gradient
        rest(loss)
        # only now: in a backward a checkpoint of torch's repeats its forward
        if self._statistics is not None and self._statistics.in_last_part:
            self._end_statistics()  # a later whole batch must not undo a momentum that the user has set since

    def _in_parts(self, step: Step, rest: Chain, parts: list[Part]) -> Any:
        shares, module, own = [part.share for part in parts], step.module, self._own
        assert own is not None
        statistics = self._statistics = RunningStatistics(module, shares)
        joined = _Joined(shares, self.logs, statistics.ran)
        (_, *more), named = step.inputs
        # batches before it may have had no loss
        fresh = begins_sum(module.trainer) or all(parameter.grad is None for parameter in module.parameters())
        if fresh:
            _free_gradients(module)
        own.note()
        self._n_runs = 0
        step = replace(step, beside_bytes=own.n_bytes)
        for index, part in enumerate(parts):
            statistics.begin(index)
            if index:
                own.put_back()
            run, finish = partial(self._logged, index, step.run), partial(joined.take, index)
            inputs = (part.batch, *more), named
            output = rest.forward(replace(step, run=run, inputs=inputs, finish=finish, later=index > 0))
            # a retry writes what it puts back
            if index == 0 and self._watched and self._n_runs == 1 and (name := own.unforeseen()):
                raise set_otherwise(name, "in some batches alone")
            if output is None:  # Lightning skips such a batch
                self._end_statistics()
                _skip(module, index, fresh=fresh)
                self.logs.tell(joined.shares)
                return None
            if index + 1 < len(parts):
                _backward(module, output)
                del output
                rest.done()
        self._held = _taken(module) if fresh else []
        return output

    def _end_statistics(self) -> None:
        if self._statistics is not None:
            self._statistics.end()
        self._statistics = None

    def _logged(self, index: int, inner: Run, *args: Any, **kwargs: Any) -> Any:
        self.logs.begin(index)
        self._n_runs += 1
        return inner(*args, **kwargs)

    def _number(self, step: Step) -> int:
        trainer: Any = step.module.trainer
        adds = trainer.accumulate_grad_batches > 1  # gradients of other batches take room; may change between epochs
        kind = (signature_of(step.inputs, step.module), step.extra, self._memory.planner.limits, adds)
        self._look_back(kind)
        if kind not in self._numbers:
            try:
                self._numbers[kind] = self._decided(step.module, step.run, step.inputs)
            except ConfigError as obstacle:
                if self._refusal is None:
                    raise
                raise self._refusal from obstacle
        elif kind in self._outgrown:
            self._outgrown.discard(kind)
            self._numbers[kind] = self._memory.planner.fewest_sub_batches(step.inputs, more_than=self._numbers[kind])
            self._memory.note(BatchesCut(n_samples(step.inputs[0][0]), self._numbers[kind]))
        return self._numbers[kind]

    def _look_back(self, kind: Hashable) -> None:
        """Note whether parts of the batch before, of its kind, have no plan: predicted ones had."""
        found = self._memory.planner.n_too_large
        if found > self._n_too_large:
            self._outgrown.add(self._last)
        self._n_too_large, self._last = found, kind

    def _decided(self, module: LightningModule, inner: Run, inputs: Any) -> int:
        """Number of sub-batches of a kind of batch, after the check that it can be split."""
        n = n_samples(inputs[0][0] if inputs[0] else None)
        if n < 2 and not self._numbers and self._asked != "auto":
            raise ConfigError(f"sub_batches={self._asked!r} is impossible: the batch has {n} sample.", _HINT)
        most = n // LEAST_ASKED if batch_norm_of(module) else n
        fewest = partial(self._memory.planner.fewest_sub_batches, inputs)
        number = min(self._asked, most) if isinstance(self._asked, int) else fewest()
        if number > 1:
            own_bytes = self._check_batch(module, inner, inputs).n_bytes
            self._memory.beside.own_bytes = own_bytes
            if own_bytes and self._asked == "auto":
                number = fewest()
            self._memory.note(BatchesCut(n, number))
        return number

    def _check_batch(self, module: LightningModule, inner: Run, inputs: Any) -> OwnChanges:
        found = batch_norm_of(module)
        if found and not self._batch_norm:
            raise ConfigError(
                f"sub_batches={self._asked!r} is not supported: {found} normalises each sample by its whole batch.",
                "Write memory=Memory(batch_norm_in_parts=True) to have each part normalised by itself, use GroupNorm "
                "or LayerNorm, put it in evaluation mode, or leave sub_batches out.",
            )
        if self._own is not None:
            return self._own
        (batch, *more), named = inputs
        half = computes_in_half(module.device.type, module.parameters())
        try:
            self.logs.begin(0)
            checked = check_mean(module, lambda few: inner(few, *more, **named), batch, half=half)
        finally:
            self.logs.close()
        self._own, self._watched = OwnChanges(module, checked.changed), not checked.unknown
        if checked.unknown and self._refusal is not None:
            raise self._refusal  # nobody has said that it is one
        if checked.unknown:
            rank_zero_warn(
                f"CTDR: whether the loss is a mean over samples could not be checked: {checked.unknown}. Only where it "
                "is, sub-batches have the gradients of the whole batch."
            )
        return self._own


class _Joined:
    """Results of the sub-batches of one batch."""

    def __init__(self, shares: list[float], logs: JoinedLogs, ran: Callable[[], None]) -> None:
        self.shares, self._logs, self._ran = shares, logs, ran
        self._sums: list[Tensor] = []
        self._outputs: list[tuple[float, Any]] = []

    def take(self, index: int, output: Any) -> Any:
        """Note the result of a sub-batch, or of its repetition.

        Returns:
            The loss up to here, which leads back to this sub-batch alone, so that all have one graph; for the last one,
            the result of the whole batch's step.
        """
        del self._sums[index:], self._outputs[index:]
        with no_dispatch_modes():
            self._ran()
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


def _skip(module: LightningModule, index: int, *, fresh: bool) -> None:
    """Undo the earlier parts of a batch of which one has no loss.

    Raises:
        ConfigError: If gradients of earlier batches were there, to which those parts have added.
    """
    if fresh:
        _free_gradients(module)
    elif index:
        raise ConfigError(
            f"training_step returned no loss for sub-batch {index + 1} of a batch whose gradients are added to those "
            "of earlier batches: the gradients of its other sub-batches cannot be taken out of the sums.",
            "Return None for all sub-batches of a batch, or a loss of zero; or leave accumulate_grad_batches or "
            "sub_batches out, or raise memory_budget so that the batch fits whole.",
        )


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
    loss = loss / trainer.accumulate_grad_batches  # by 1 too: a graph without it would be another kind of step
    torch.clear_autocast_cache()
    with torch.autocast(module.device.type, enabled=False):
        module.backward(loss if scaler is None else scaler.scale(loss))
