"""Higher-order operators (``torch.cond``, ``while_loop``) beside a dispatch mode.

Called from eager code, such an operator compiles itself. Under a dispatch mode torch skips that: a ``cond`` whose
branches return a bare tensor then fails, a ``while_loop`` always does, and a later call without the mode fails as well,
because the compiler remembers that it skipped. So the operator runs without any mode: no op in it is seen or run again,
and autograd's saves in it are held.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ctdr_lightning.basics.torch_private import higher_order_utils, no_dispatch_modes

_ENTRY = "_hop_compile_and_call"  # torch before 2.13 has no such single way in


class HigherOrderUnseen:
    """While entered, higher-order operators that compile themselves run without dispatch modes."""

    def __enter__(self) -> HigherOrderUnseen:
        self._original = original = getattr(higher_order_utils, _ENTRY, None)
        if original is not None:

            def without_modes(*args: Any, **kwargs: Any) -> Any:
                with no_dispatch_modes():
                    return original(*args, **kwargs)

            setattr(higher_order_utils, _ENTRY, without_modes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._original is not None:
            setattr(higher_order_utils, _ENTRY, self._original)
