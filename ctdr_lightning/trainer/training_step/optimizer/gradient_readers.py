"""Steps that read the gradients of the step before, which a memory plan would free before its forward.

Lightning frees them after the forward. Code that mentions ``.grad`` in ``training_step``, in ``forward``, in a method
that these may call, or in ``on_before_zero_grad``, is taken to read them. An optimizer that steps in the backward frees
them there: every other hook then reads them too late.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import nn

_BEFORE_THE_BACKWARD = {"training_step", "forward", "on_before_zero_grad"}
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "ctdr_lightning")


def gradient_reader(module: nn.Module, callbacks: Iterable[Any] = (), *, after_backward: bool = False) -> str:
    """Name the first function that reads gradients before the backward.

    Args:
        module: Its own classes and those of its submodules are looked through.
        callbacks: So are theirs.
        after_backward: Whether to look through the hooks that run after the backward, too.

    Returns:
        The function's name; empty if there is none.

    Example:
        >>> gradient_reader(nn.Linear(2, 2))
        ''
    """
    kinds = {base: None for thing in (*module.modules(), *callbacks) for base in type(thing).__mro__}
    own = (kind for kind in kinds if kind.__module__.partition(".")[0] not in _FOREIGN)
    return next((f"{kind.__name__}.{name}" for kind in own for name in _readers(kind, after_backward)), "")


def _readers(kind: type, after_backward: bool) -> Iterator[str]:
    for name, thing in vars(kind).items():
        hook = hasattr(LightningModule, name) or hasattr(Callback, name)
        runs = after_backward or name in _BEFORE_THE_BACKWARD or not hook
        if isinstance(thing, FunctionType) and runs and _reads(thing.__code__):
            yield name


def _reads(code: CodeType) -> bool:
    read = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    own = any(name == "grad" and before != "autograd" for before, name in zip(["", *read], read, strict=False))
    return own or any(_reads(inner) for inner in code.co_consts if isinstance(inner, CodeType))
