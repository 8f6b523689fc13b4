"""Keeps the backward of a step that differed from its plan under the budget, where no allocator counts."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ctdr_lightning.basics.torch_private import OpMode, OpOverload
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.values.higher_order import HigherOrderUnseen
from ctdr_lightning.memory.values.sharded import on_shards


class BackwardWatch(OpMode):
    """Has an evictor count what the backward makes, and make room for it.

    Args:
        evictor: Of the step's forward, which is over.
    """

    # torch refuses a higher-order operator (`torch.cond`, flex_attention) under a mode that does not say it takes them.
    supports_higher_order_operators = True

    def __init__(self, evictor: Evictor) -> None:
        super().__init__()
        self.evictor, self._unseen = evictor, HigherOrderUnseen()

    def __enter__(self) -> BackwardWatch:
        self.evictor.__enter__()
        self._unseen.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        self._unseen.__exit__(kind, error, tb)
        self.evictor.__exit__(kind, error, tb)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and on_shards(types):
            return NotImplemented
        return self.evictor.run(func, args, kwargs or {})
