"""A step that failed is run again as if the first try had never been, or not at all.

Two failures are mended so: memory ran out, after which the plan is tighter, and a dropped tensor came back with other
contents, after which it is held.

Everything that the step can reach is restored: tensors, attributes, containers, random generators, gradients. If
something changed that cannot be restored, if an optimizer has stepped, or if other processes took part, the original
error is raised with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ctdr_lightning.basics.errors import CTDRError, ReplayError
from ctdr_lightning.basics.gpu_memory import counts, free_cache, left_bytes
from ctdr_lightning.memory.guide.step_guide import StepGuide
from ctdr_lightning.trainer.modules import overrides
from ctdr_lightning.trainer.training_step.layers import Backward, Chain, Layer, Step, loss_of
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.patches import LogCalls
from ctdr_lightning.trainer.training_step.retry.snapshot import MODULE, OPTIMIZERS, Snapshot
from ctdr_lightning.trainer.training_step.retry.standing import Standing
from ctdr_lightning.trainer.training_step.retry.write_guard import CannotRepeatError, WriteGuard

# Each try has a fifth less: 0.8 ** 7 is a fifth of the first budget, beyond which no plan was ever found.
MAX_TRIES = 8
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",
    # Messages of a GPU's libraries near a full card: no room for a handle, for a workspace, for a buffer.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Failed to CUDA calloc",
)
# cuDNN says these where no algorithm's workspace fits, and also where it has no algorithm at all.
_MAYBE = ("unable to find an engine to execute this computation", "CUDNN_STATUS_NOT_SUPPORTED")
# Chosen, not tuned: cuDNN's workspaces are seldom larger than a tenth of a card.
NEARLY_FULL = 0.1
_BETWEEN = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
Run = Callable[[], Any]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on a CPU.

    cuDNN's "no engine" counts if the GPU is nearly full. Memory that ran out in a place of offloaded tensors does not
    count: a tighter plan would send more there.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, CTDRError):
        return False
    said = str(error)
    return any(sign in said for sign in _SIGNS) or (any(sign in said for sign in _MAYBE) and _nearly_full())


def _nearly_full() -> bool:
    if not torch.cuda.is_initialized():
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    now = counts(device)
    most = left_bytes(device) + now.allocated  # of the card, as far as other processes and a cap allow
    return most - now.reserved < NEARLY_FULL * most


def _may_be_mended(error: BaseException) -> bool:
    return is_out_of_memory(error) or isinstance(error, ReplayError)


class Retry(Layer):
    """Runs forward and backward of one step after another, and runs them again where memory ran out.

    Args:
        session: Knows whether the ops of a step exchange data with other processes.
        memory: Makes room for the copies, and plans the step for less where memory ran out.
        calls: Counts the step's logs.
    """

    def __init__(self, session: StepGuide, memory: MemoryStage, calls: LogCalls) -> None:
        self._session, self._memory, self._calls = session, memory, calls
        self._next_bytes = 0
        self._rest = Chain(())
        self._written: set[Hashable] = set()
        self._standing = Standing()
        self._snapshot: Snapshot | None = None
        self._forward: Run | None = None
        self._loss: Tensor | None = None
        self._module: LightningModule | None = None
        self._began = ""
        self._one_is_done = False
        self._guard: WriteGuard | None = None

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run the forward; where it fails, once more.

        Args:
            step: Of a module that is attached to its trainer.
            rest: The layers inside.

        Raises:
            OutOfMemoryError: The step's own, or the CPU allocator's RuntimeError, where it cannot be repeated or every
                try has failed.
        """
        module = step.module
        self._module, self._rest, self._began, self._guard = module, rest, "", None
        self._calls.begin()
        optimizers = module.trainer.optimizers
        roots = {MODULE: module, "batch": step.inputs, OPTIMIZERS: optimizers}
        with self._watched(optimizers) if not module.automatic_optimization else nullcontext():
            # with the watching hooks in place, which it would take off
            snapshot = self._snapshot = Snapshot(roots, self._written, self._standing)
            self._forward = partial(self._once, replace(step, beside_bytes=step.beside_bytes + snapshot.copied_bytes))
            output = self._until_it_fits(self._forward)
        self._next_bytes = self._snapshot.learn()
        self._snapshot.forget_gradients()
        loss = loss_of(output)
        self._loss = loss.detach().clone() if loss is not None else None
        return output

    def _once(self, step: Step) -> Any:
        assert self._snapshot is not None
        if self._memory.copies(self._snapshot.copied_bytes) and self._memory.make_room():
            self._snapshot.forget_gradients()
        return self._rest.forward(replace(step, copies=(*self._snapshot.copies, *self._snapshot.states)))

    def backward(self, loss: Tensor, rest: Backward) -> None:
        """Run the backward; where it fails, forward and backward."""
        module, old, forward, snapshot = self._module, self._loss, self._forward, self._snapshot
        if module is None or not module.automatic_optimization or old is None or forward is None or snapshot is None:
            processes = module.trainer.world_size if module is not None else 1
            self._began = self._began or ("its backward" if processes > 1 else "")
            rest(loss)
            return
        given = loss.detach().clone()
        snapshot.note_gradients()

        def run() -> None:
            rest(loss)

        def again() -> None:
            with module.trainer.precision_plugin.train_step_context():  # the backward is outside of it
                repeated = loss_of(forward())
            assert repeated is not None
            rest(scaled_like(repeated, old, given, module.trainer.accumulate_grad_batches))

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
        """The step is over: copies of its beginning may be freed."""
        self._snapshot = self._forward = self._loss = self._module = None
        self._one_is_done = True
        self._standing.release()
        self._memory.copies(self._next_bytes)

    def leave(self) -> None:
        """Let go of the module, and of everything that was found in it."""
        self._snapshot = self._forward = self._loss = self._module = None
        self._standing = Standing()

    def _until_it_fits(
        self, run: Run, again: Run | None = None, hindrance: str = "", freed: Tensor | None = None
    ) -> Any:
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not _may_be_mended(error):
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
        latest = error
        for left in reversed(range(MAX_TRIES - 1)):
            self._undo(snapshot, freed)
            try:
                self._mend(latest)
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
                if not _may_be_mended(another) or not left:
                    raise
                latest = another.with_traceback(None)
                reason = self._cannot_be_put_back()
            if reason:
                raise self._explained(error, reason)
        raise AssertionError("unreachable")

    def _mend(self, error: BaseException) -> None:
        """Plan the next attempt so that the failure cannot recur."""
        if isinstance(error, ReplayError):
            self._session.refute(error)
        else:
            self._memory.tighten(_first_line(error))

    def _cannot_be_put_back(self) -> str:
        assert self._snapshot is not None
        if self._session.writes_unseen:
            return "a kernel that torch does not see writes to tensors from before the step"
        hidden = hidden_random_state(self._module) if self._module is not None and self._has_drawn(self._module) else ""
        return hidden or self._snapshot.cannot_be_put_back()

    def _has_drawn(self, module: LightningModule) -> bool:
        """Whether a step was before this one: the first draws all states from the generators that are restored."""
        return self._one_is_done or module.trainer.fit_loop.total_batch_idx > 0

    def _undo(self, snapshot: Snapshot, freed: Tensor | None) -> None:
        drop_graph(freed)
        self._rest.leave()
        snapshot.put_back()
        # frames and autograd's functions of the failed try may hold each other, and its tensors with them
        gc.collect()
        torch.clear_autocast_cache()  # the weights that the failed try had cast: the plan expects them to be cast again
        free_cache()

    def _hindrance(self, *, in_backward: bool) -> str:
        assert self._module is not None
        assert self._snapshot is not None
        if self._module.trainer.world_size > 1:
            if in_backward or self._began or self._calls.computed or self._session.exchanged:
                return "other processes take part in the failed step, and wait for this one"
        elif self._began:
            return self._began
        self._session.abort()  # only then are the step's writes past torch known
        return self._cannot_be_put_back()

    def _explained(self, error: BaseException, reason: str) -> BaseException:
        assert self._module is not None
        trainer = self._module.trainer
        rank = f" on rank {trainer.global_rank} of {trainer.world_size}" if trainer.world_size > 1 else ""
        wrong = isinstance(error, ReplayError)
        what = "a dropped tensor came back with other contents" if wrong else "memory ran out"
        hint = "a larger memory_budget, under which it is kept" if wrong else "a smaller memory_budget"
        said = f"CTDR: {what}{rank}, and the step cannot be retried: {reason}."
        error.args = (f"{error}\n{said}\nHINT: {hint}, or a smaller batch.",)
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


def hidden_random_state(module: nn.Module) -> str:
    """Names a recurrent layer whose dropout cuDNN draws from a state of its own; empty where there is none.

    Restoring a GPU's generator has that state drawn anew (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, `set_state`).
    """
    for name, layer in module.named_modules():
        drops = isinstance(layer, nn.RNNBase) and layer.training and layer.dropout and layer.num_layers > 1
        if drops and any(p.is_cuda for p in layer.parameters()):
            return f"cuDNN keeps the random state of the dropout in {name or type(layer).__name__} to itself"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["out of memory"])[0]


def scaled_like(loss: Tensor, old: Tensor, given: Tensor, n_batches: int) -> Tensor:
    """Scale a repeated step's loss as the trainer had scaled the first try's, with the same operations.

    Args:
        loss: Loss of the repeated step.
        old: Loss of the failed attempt, detached.
        given: The trainer's version of the latter.
        n_batches: Batches whose gradients are added up.
    """
    scale = round((given.double() / old.double()).item() * n_batches) if old.item() else 1
    mean = loss / n_batches  # for one batch too: a step is known by its graph
    return mean * scale if scale != 1 else mean


def drop_graph(loss: Tensor | None) -> None:
    """Let go of the graph behind a loss that the trainer still holds."""
    if loss is not None and loss.grad_fn is not None:
        loss.detach_()
