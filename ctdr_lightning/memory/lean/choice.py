"""The leaner step for a budget: outputs are left out first, and modules run in tiles where no plan fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import LeftOut, left_out
from ctdr_lightning.memory.lean.tiles import InTiles, found_tiles
from ctdr_lightning.memory.traces.trace import LEAN


@dataclass(frozen=True)
class LeanChoice:
    """A step that needs less than the plain one.

    Attributes:
        outputs: Outputs that it does without; None where it makes all.
        tiles: Modules that run in tiles; None where all run whole.
    """

    outputs: LeftOut | None
    tiles: InTiles | None

    @cached_property
    def account(self) -> BatchAccount:
        """The batch in such a step; its trace says how it is leaner."""
        last = self.tiles or self.outputs
        assert last is not None
        return replace(last.account, step=last.account.step.with_note(LEAN, str(self)))

    @property
    def step(self) -> LeanStep:
        """The step, to be entered."""
        names = self.outputs.names if self.outputs is not None else ()
        return LeanStep(names, self.tiles.tiles if self.tiles is not None else None)

    def __str__(self) -> str:
        return " ".join(str(part) for part in (self.outputs, self.tiles) if part is not None)


def choose_lean(
    model: nn.Module,
    account: Callable[[LeanStep], BatchAccount],
    budget_bytes: int | None,
    *,
    plain: BatchAccount | None = None,
    policy: str = "auto",
    tiles: bool = True,
) -> LeanChoice | None:
    """A leaner step for a budget; None where the plain one fits without a plan, or nothing is gained.

    Args:
        model: The model.
        account: From a lean step to the account of its batch, on fake tensors.
        budget_bytes: The budget; without one the step stays plain.
        plain: The account of the plain step, where it is known.
        policy: The memory policy's name.
        tiles: Whether modules may run in tiles.
    """
    if budget_bytes is None:
        return None
    plain = plain or account(LeanStep())
    outputs = left_out(model, account, budget_bytes, plain)
    if not tiles:
        return LeanChoice(outputs, None) if outputs is not None else None
    whole, names = (outputs.account, outputs.names) if outputs is not None else (plain, ())
    found = None
    if whole.floor_bytes > budget_bytes:  # a plan that is higher than the floor is not looked for: that takes seconds
        found = found_tiles(model, account, LeanStep(names), budget_bytes, policy, whole)
    return LeanChoice(outputs, found) if outputs is not None or found is not None else None
