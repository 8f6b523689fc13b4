"""A step that ran out of memory is run again, under a tighter plan, as if the first try had never been.

The retry starts from the same random state and the same buffers. Gradients must not have been there before (the first
micro-batch of an accumulation): what a failed backward has added to older ones cannot be told apart. Under DDP a failed
backward is not retried, because the other ranks are waiting in its collectives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ctdr_lightning.trainer.training_step.patches import Patches

MAX_TRIES = 8
_SMALL = 2**16
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class Before:
    """Random state, small buffers and gradients as they were before a step.

    Large buffers (masks, tables) are not copied: layers do not write them in a step.

    Args:
        module: The module whose step is about to run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [b for b in module.buffers() if b.numel() <= _SMALL]
        self._copies = [b.detach().clone() for b in self._buffers]
        self._random = torch.get_rng_state()
        self._devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
        self._cuda = [torch.cuda.get_rng_state(d) for d in self._devices]
        self.had_gradients = any(p.grad is not None for p in module.parameters())

    def put_back(self) -> None:
        """Undo what the failed try has left."""
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                buffer.copy_(copy)
        if not self.had_gradients:
            for parameter in self._module.parameters():
                parameter.grad = None
        self.reset_random()
        if self._devices:
            torch.cuda.empty_cache()

    def reset_random(self) -> None:
        """Take the random state back to before the step."""
        torch.set_rng_state(self._random)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)


def attempt(run: Callable[[], Any]) -> tuple[Any, str]:
    """Run, and turn a lack of memory into its message; the error itself would keep the failed try alive.

    Returns:
        The result and an empty string, or None and the message.
    """
    try:
        return run(), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).splitlines()[0] or "out of memory"


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


def free(losses: Iterable[Tensor]) -> None:
    """Let go of the graphs behind losses that others still hold."""
    for loss in losses:
        if loss.grad_fn is not None:
            loss.detach_()


@contextmanager
def unheard(module: nn.Module) -> Iterator[None]:
    """While a step is repeated, its logging and its metrics, which the first try has already done, do nothing."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    states = [copy.deepcopy(vars(m)) for m in metrics]
    patches = Patches()
    for name in ("log", "log_dict"):
        if hasattr(module, name):
            patches.put(module, name, lambda _: _say_nothing)
    try:
        yield
    finally:
        patches.undo()
        for metric, state in zip(metrics, states, strict=True):
            vars(metric).update(state)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for ``log`` while a step is repeated."""
