"""Higher-order operators (``torch.cond``, ``while_loop``, flex attention) under a dispatch mode.

Called from eager code, such an operator compiles itself. Under a dispatch mode torch skips that: a ``cond`` whose
branches return a bare tensor then fails, a ``while_loop`` always does, and a later call without the mode fails as well,
because the compiler remembers that it skipped. So the operator runs without any mode: no op in it is seen or run again,
and autograd's saves in it are held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ctdr_lightning.basics.torch_private import higher_order_utils, no_dispatch_modes

_ENTRY = "_hop_compile_and_call"  # torch before 2.13 has no such single way in
_FLEX, _FLEX_ENTRY = "torch.nn.attention.flex_attention", "setup_compilation_env"  # it compiles itself by itself


class HigherOrderUnseen:
    """While entered, higher-order operators that compile themselves run without dispatch modes."""

    def __enter__(self) -> HigherOrderUnseen:
        self._originals: list[tuple[Any, str, Any]] = []
        self._replace(higher_order_utils, _ENTRY, _without_modes)
        self._replace(sys.modules.get(_FLEX), _FLEX_ENTRY, _also_without_modes)  # not imported: not called
        return self

    def _replace(self, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(module, name, None)
        if original is not None:
            self._originals.append((module, name, original))
            setattr(module, name, wrap(original))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for module, name, original in reversed(self._originals):
            setattr(module, name, original)


def _without_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch_modes():
            return original(*args, **kwargs)

    return run


def _also_without_modes(original: Callable[[], Any]) -> Callable[[], Any]:
    @contextmanager
    def prepared() -> Iterator[Any]:
        with no_dispatch_modes(), original() as backend:
            yield backend

    return prepared
