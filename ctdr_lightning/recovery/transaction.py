"""A change of a model's layers is whole or absent: an exception in the middle, Ctrl-C included, undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ctdr_lightning.basics.interrupts import interrupts_held
from ctdr_lightning.recovery.batchnorm import tracked

PutBack = Callable[[], None]


@contextmanager
def all_or_nothing(*put_backs: PutBack) -> Iterator[None]:
    """Undo the block's changes when it raises, then raise on.

    Args:
        put_backs: Called in order; each undoes one thing. A second Ctrl-C waits until the last is done.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> dense = model[0]
        >>> try:
        ...     with all_or_nothing(layers_as_now(model)):
        ...         model[0] = nn.Identity()
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt:
        ...     model[0] is dense
        True
    """
    try:
        yield
    except BaseException:
        with interrupts_held():
            for put_back in put_backs:
                put_back()
        raise


def layers_as_now(model: nn.Module) -> PutBack:
    """Remember which modules stand where, and the running statistics; the result puts both back.

    Weights are not copied: whoever exchanges a layer leaves the old one as it was.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    statistics = [(buffer, buffer.clone()) for layer in tracked(model).values() for buffer in layer.buffers()]

    @torch.no_grad()
    def put_back() -> None:
        for name, module in modules.items():
            parent, _, key = name.rpartition(".")
            if name and getattr(modules[parent], key) is not module:
                setattr(modules[parent], key, module)
        for buffer, copy in statistics:
            buffer.copy_(copy)

    return put_back
