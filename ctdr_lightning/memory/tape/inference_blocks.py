"""Detection of blocks of ``torch.inference_mode`` in the forward.

Such a block restores the dispatcher's state when it ends. A dispatch mode that left the stack or came back in between
would be there with the wrong state: torch then fails with an internal assert in the next op. So whoever moves a mode
must know of the block, also of ``inference_mode(False)``, which ``torch.is_inference_mode_enabled`` does not show.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from torch import inference_mode


class InferenceBlocks:
    """While entered, counts the blocks of ``torch.inference_mode`` that this thread is in.

    Attributes:
        depth: How many blocks were entered here and not left yet.

    Example:
        >>> import torch
        >>> with InferenceBlocks() as blocks, torch.inference_mode():
        ...     blocks.depth
        1
    """

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> InferenceBlocks:
        self.depth = 0
        thread = threading.get_ident()
        self._original = enter, leave = inference_mode.__enter__, inference_mode.__exit__

        # torch calls nobody when a block begins, so the two methods of its class are wrapped as long as we look.
        def entering(block: Any) -> None:
            enter(block)
            if threading.get_ident() == thread:
                self.depth += 1

        def leaving(block: Any, *exc: Any) -> None:
            leave(block, *exc)
            if threading.get_ident() == thread:
                self.depth -= 1

        inference_mode.__enter__, inference_mode.__exit__ = entering, leaving  # type: ignore[method-assign]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        inference_mode.__enter__, inference_mode.__exit__ = self._original  # type: ignore[method-assign]
