"""A step made lean: without the outputs of some layers, and with some modules in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.lazy.logits import Outcome
from ctdr_lightning.memory.tiles.tiled_modules import Checked, TiledModules

M = TypeVar("M", bound=nn.Module)

_BYTES_AN_OUTPUT = 12  # itself, its logarithmic probability and its gradient, in 32 bits


class LeanStep:
    """The layers of a model and its copies whose outputs are left out in a step, and the modules that run in tiles.

    Args:
        names: Of the layers; none by default. None is all large linear layers, those of factors included.
        tiles: From names of modules to their numbers of tiles.

    Attributes:
        outcomes: What became of the layers' outputs in the last step.
        left_alone: From names of modules that ran whole after all in the last step to the reasons.
    """

    def __init__(self, names: tuple[str, ...] | None = (), tiles: Mapping[str, int] | None = None) -> None:
        self.names, self.tiles = names, dict(tiles or {})
        self.outcomes: Mapping[str, Outcome] = {}
        self.left_alone: Mapping[str, str] = {}
        self._checked: Checked = WeakKeyDictionary()

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[LazyHeads | None]:
        """Run the forward of a model, or of a copy of it, so."""
        heads = LazyHeads(model, self.names) if self.names != () else None
        tiled = TiledModules(model, self.tiles, checked=self._checked) if self.tiles else None
        with ExitStack() as stack:
            for part in (heads, tiled):
                if part is not None:
                    stack.enter_context(part)
            yield heads
        self.outcomes = heads.outcomes if heads is not None else {}
        self.left_alone = tiled.left_alone if tiled is not None else {}

    @property
    def outputs_bytes(self) -> int:
        """Bytes that the outputs of the last step would have taken with all that their loss makes of them."""
        return _BYTES_AN_OUTPUT * sum(outcome.n_outputs for outcome in self.outcomes.values())

    def step(self, step: Callable[[M, Any], Tensor]) -> Callable[[M, Any], Tensor]:
        """The lean form of a step."""

        def lean(model: M, batch: Any) -> Tensor:
            with self.of(model):
                return step(model, batch)

        return lean
