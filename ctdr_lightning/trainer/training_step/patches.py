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
        self._originals: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method by the result of ``make``, which keeps its name and signature.

        An attribute that the instance had already, such as that of torch.compile, comes back with `undo`.
        """
        inner = getattr(owner, name)
        self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        vars(owner)[name] = _named_like(inner, make(inner))

    def undo(self) -> None:
        """Take everything off again, the last first."""
        while self._originals:
            owner, name, before = self._originals.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before


def _named_like(inner: Callable[..., Any], outer: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return outer(*args, **kwargs)

    return functools.wraps(inner)(call)


class LogCalls:
    """Counts the calls of ``log`` in a step, so that a step that is run again logs nothing twice.

    Attributes:
        computed: Whether a metric was computed in the step, for which processes exchange their states.
    """

    def __init__(self) -> None:
        self._made = self._skipped = 0
        self.computed = False

    def begin(self) -> None:
        """A step begins."""
        self._made = self._skipped = 0
        self.computed = False

    def repeat(self) -> None:
        """The step begins again: logs of earlier attempts are not repeated."""
        self._skipped, self._made = max(self._skipped, self._made), 0

    def counted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A ``log`` that is counted and, in a step that is run again, left out where it was called before."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._made += 1
            if self._made > self._skipped:
                with no_dispatch_modes():
                    return inner(*args, **kwargs)
            return None

        return call

    def noted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A metric's ``compute`` that is noted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.computed = True
            return inner(*args, **kwargs)

        return _unseen(call)


def hide_bookkeeping(patches: Patches, module: nn.Module, calls: LogCalls) -> None:
    """Let logs and metrics run unseen by recorder and tape.

    Lightning and torchmetrics run other tensor ops in an epoch's first step than in later ones; planned, they would
    make every such step differ from its plan. No gradient goes through them.
    """
    patches.put(module, "log", calls.counted)
    for metric in module.modules():
        if isinstance(metric, Metric):
            for name, make in (("forward", _unseen), ("update", _unseen), ("compute", calls.noted)):
                patches.put(metric, name, make)


def _unseen(inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch_modes():
            return inner(*args, **kwargs)

    return call
