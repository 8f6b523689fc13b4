"""A step that ran out of memory is run again under a tighter plan as if the first try had never been, or not at all.

What the step can reach is put back as it was: tensors, attributes, containers, random generators, gradients. Where
something changed that cannot be put back, where an optimizer has stepped, or where other processes took part, the
original error is raised with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from ctdr_lightning.memory import Session
from ctdr_lightning.trainer.modules import overrides
from ctdr_lightning.trainer.training_step.patches import LogCalls
from ctdr_lightning.trainer.training_step.snapshot import OPTIMIZERS, Gradients, Snapshot
from ctdr_lightning.trainer.training_step.write_guard import CannotRepeatError, WriteGuard

# Each try has a fifth less: 0.8 ** 7 is a fifth of the first budget, beyond which no plan was ever found.
MAX_TRIES = 8
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",
)
_BETWEEN = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
Run = Callable[[], Any]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class Retry:
    """Runs forward and backward of one step after another, and runs them again where memory ran out.

    Args:
        session: Knows whether the ops of a step exchange data with other processes.
        leave: Takes off everything that a failed step has installed.
        tighten: Called with the message of the error before the step is run again.
        calls: Counts what the step logs.

    Attributes:
        copied_bytes: Size of the copies that stand beside the present step, to put back what it writes.
    """

    def __init__(
        self, session: Session, leave: Callable[[], None], tighten: Callable[[str], None], calls: LogCalls
    ) -> None:
        self._session, self._leave, self._tighten, self._calls = session, leave, tighten, calls
        self.copied_bytes = 0
        self._written: set[Hashable] = set()
        self._snapshot: Snapshot | None = None
        self._forward: Run | None = None
        self._loss: Tensor | None = None
        self._module: LightningModule | None = None
        self._began = ""
        self._guard: WriteGuard | None = None

    @property
    def copies(self) -> list[Tensor]:
        """The copies that stand beside the present step until its backward is over."""
        return self._snapshot.copies if self._snapshot is not None else []

    def forward(self, module: LightningModule, run: Run, inputs: Any) -> Any:
        """Run ``training_step``.

        Args:
            module: The module, attached to its trainer.
            run: The wrapped step.
            inputs: Its arguments.

        Raises:
            OutOfMemoryError: The step's own, or the CPU allocator's RuntimeError, where it cannot be repeated or every
                try has failed.
        """
        self._module, self._forward, self._began, self._guard = module, run, "", None
        self._calls.begin()
        optimizers = module.trainer.optimizers
        roots = {"module": module, "batch": inputs, OPTIMIZERS: optimizers}
        with self._watched(optimizers) if not module.automatic_optimization else nullcontext():
            self._snapshot = Snapshot(roots, self._written)  # with the watching hooks in place, which it would take off
            self.copied_bytes = self._snapshot.copied_bytes
            output = self._until_it_fits(run)
        self._snapshot.learn()
        self._snapshot.forget_gradients()
        loss = loss_of(output)
        self._loss = loss.detach().clone() if loss is not None else None
        return output

    def backward(self, module: LightningModule, inner: Callable[..., None], loss: Tensor) -> None:
        """Run ``backward``; where it fails, forward and backward.

        Args:
            module: The module.
            inner: From the loss, as the trainer has scaled it, to nothing.
            loss: That loss.
        """
        old, forward, snapshot = self._loss, self._forward, self._snapshot
        if not module.automatic_optimization or old is None or forward is None or snapshot is None:
            self._began = self._began or ("its backward" if module.trainer.world_size > 1 else "")
            inner(loss)
            return
        given = loss.detach().clone()
        snapshot.gradients = Gradients(snapshot.reach.tensors)

        def run() -> None:
            inner(loss)

        def again() -> None:
            repeated = loss_of(forward())
            assert repeated is not None
            inner(scaled_like(repeated, old, given))

        self._until_it_fits(run, again, _hooks_between(module), freed=loss)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer begins to step within the step: from now on it cannot be repeated.

        Args:
            optimizer: Which.
        """
        self._began = f"{type(optimizer).__name__} has begun to step in it"
        if self._guard is not None:  # the first try never came to this: all that follows happens once
            self._guard.watching = False

    def done(self) -> None:
        """The step is over: what was there before it may be freed."""
        self._snapshot = self._forward = self._loss = self._module = None

    def _until_it_fits(
        self, run: Run, again: Run | None = None, hindrance: str = "", freed: Tensor | None = None
    ) -> Any:
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = self._hindrance(in_backward=again is not None) or hindrance
            if reason:
                raise self._explained(error, reason)  # noqa: B904  it is the same error
            first = error.with_traceback(None)  # its frames would keep the failed try alive
            first.__context__ = first.__cause__ = None
        del run
        return self._repeat(again, first, freed) if again is not None else self._repeat(self._run_again, first, freed)

    def _run_again(self) -> Any:
        assert self._forward is not None
        return self._forward()

    def _repeat(self, run: Run, error: BaseException, freed: Tensor | None) -> Any:
        snapshot = self._snapshot
        assert snapshot is not None
        for left in reversed(range(MAX_TRIES - 1)):
            self._undo(snapshot, freed)
            try:
                self._tighten(_first_line(error))
            except MemoryError:  # on a CPU a plan is made in the memory that ran out
                if not left:
                    raise self._explained(error, "to plan it for less ran out of memory, too") from None
                continue
            self._calls.repeat()
            try:
                self._guard = WriteGuard(snapshot.copied, snapshot.drawn_from)
                with self._guard:
                    return run()
            except CannotRepeatError as refusal:
                reason = str(refusal)
            except (RuntimeError, MemoryError) as another:
                reason = ""
                if not is_out_of_memory(another) or not left:
                    raise
                reason = snapshot.cannot_be_put_back()
            if reason:
                raise self._explained(error, reason)
        raise AssertionError("unreachable")

    def _undo(self, snapshot: Snapshot, freed: Tensor | None) -> None:
        drop_graph(freed)
        self._leave()
        snapshot.put_back()
        # frames and autograd's functions of the failed try may hold each other, and its tensors with them
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _hindrance(self, *, in_backward: bool) -> str:
        assert self._module is not None
        assert self._snapshot is not None
        if self._module.trainer.world_size > 1:
            if in_backward or self._began or self._calls.computed or self._session.exchanged:
                return "other processes take part in what failed, and wait for this one"
        elif self._began:
            return self._began
        return self._snapshot.cannot_be_put_back()

    def _explained(self, error: BaseException, reason: str) -> BaseException:
        assert self._module is not None
        trainer = self._module.trainer
        rank = f" on rank {trainer.global_rank} of {trainer.world_size}" if trainer.world_size > 1 else ""
        said = f"CTDR: memory ran out{rank}, and the step cannot be run again as if nothing had been: {reason}."
        error.args = (f"{error}\n{said}\nHINT: a smaller memory_budget or a smaller batch.",)
        return error

    @contextmanager
    def _watched(self, optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
        """Under manual optimization: notice when an optimizer begins to step."""
        handles = [optimizer.register_step_pre_hook(self.optimizer_begins) for optimizer in optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _hooks_between(module: LightningModule) -> str:
    """Names the hooks of the user that run between forward and backward, which a repeated step would leave out."""
    trainer: Any = module.trainer
    owners = [module, *trainer.callbacks]
    found = [f"{type(o).__name__}.{name}" for o in owners for name in _BETWEEN if overrides(o, name)]
    return f"{found[0]} runs between its forward and its backward" if found else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["out of memory"])[0]


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a ``training_step`` returned."""
    found = output.get("loss") if isinstance(output, dict) else output
    return found if isinstance(found, Tensor) else None


def scaled_like(loss: Tensor, old: Tensor, given: Tensor) -> Tensor:
    """Scale a repeated step's loss as the trainer had scaled the first try's (accumulation, loss scaling).

    Args:
        loss: What the repeated step returned.
        old: What the failed try returned, detached.
        given: What the trainer made of it.
    """
    ratio = (given.double() / old.double()).item() if old.item() else 1.0
    if ratio < 1:
        return loss / round(1 / ratio)
    return loss * round(ratio)


def drop_graph(loss: Tensor | None) -> None:
    """Let go of the graph behind a loss that the trainer still holds."""
    if loss is not None and loss.grad_fn is not None:
        loss.detach_()
