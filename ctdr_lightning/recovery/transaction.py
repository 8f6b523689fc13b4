"""A change of a model's layers is whole or absent: an exception in the middle, Ctrl-C included, undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
    """Remember the module tree, running statistics and biases; the result restores them.

    Weights are not copied, because an exchange leaves the old layer's weight unchanged. Its bias moves to the new layer
    and is fitted there.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    statistics: list[Tensor] = [buffer for layer in tracked(model).values() for buffer in layer.buffers()]
    biases = [p for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias" and not is_lazy(p)]
    values = [(tensor, tensor.detach().clone()) for tensor in [*statistics, *biases]]

    @torch.no_grad()
    def put_back() -> None:
        for name, module in modules.items():
            parent, _, key = name.rpartition(".")
            if name and getattr(modules[parent], key) is not module:
                setattr(modules[parent], key, module)
        for tensor, value in values:
            tensor.copy_(value)

    return put_back
