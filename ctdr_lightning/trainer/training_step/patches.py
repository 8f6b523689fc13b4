"""Instance attributes put over methods, and taken off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torchmetrics import Metric

from ctdr_lightning.basics.torch_private import no_dispatch_modes

_ABSENT = object()


class Patches:
    """Methods replaced on instances; `undo` leaves each instance as it was."""

    def __init__(self) -> None:
        self._undone: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method by what ``make`` makes of it; the new one keeps its name and signature.

        What stood on the instance already, as torch.compile puts it there, comes back with `undo`.
        """
        inner = getattr(owner, name)
        self._undone.append((owner, name, vars(owner).get(name, _ABSENT)))
        vars(owner)[name] = _named_like(inner, make(inner))

    def undo(self) -> None:
        """Take everything off again, the last first."""
        while self._undone:
            owner, name, before = self._undone.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before


def _named_like(inner: Callable[..., Any], outer: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return outer(*args, **kwargs)

    return functools.wraps(inner)(call)


def hide_bookkeeping(patches: Patches, module: nn.Module) -> None:
    """Let logs and metrics run unseen by recorder and tape.

    Lightning and torchmetrics run other tensor ops in an epoch's first step than in later ones; planned, they would
    make every such step differ from its plan. No gradient goes through them.
    """
    patches.put(module, "log", _unseen)
    for metric in module.modules():
        if isinstance(metric, Metric):
            for name in ("forward", "update", "compute"):
                patches.put(metric, name, _unseen)


def _unseen(inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch_modes():
            return inner(*args, **kwargs)

    return call
