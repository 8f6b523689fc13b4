"""Which layers' outputs to leave out: those whose loss can be taken in chunks, where a step needs their bytes.

Left-out outputs take no time, but change sums by rounding. So they come before plans that take time, and after steps
that fit unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.simulator.schedule import simulate


@dataclass(frozen=True)
class LeftOut:
    """Outputs that a step can do without.

    Attributes:
        names: Of their layers.
        chunks: Largest number of chunks that a loss is taken in.
        plain: The batch with these outputs.
        account: The batch without them.
    """

    names: tuple[str, ...]
    chunks: int
    plain: BatchAccount
    account: BatchAccount

    @property
    def saved_bytes(self) -> int:
        """Bytes by which the peak of the step without a plan falls."""
        return kept_peak_bytes(self.plain) - kept_peak_bytes(self.account)

    def __str__(self) -> str:
        return f"{in_words(self.names, self.chunks)}, for {format_bytes(self.saved_bytes)} less."


def in_words(names: Iterable[str], chunks: int) -> str:
    """Outputs that are left out, in words.

    Example:
        >>> in_words(["lm_head"], 8)
        'The output of lm_head is not made: its loss is taken in 8 chunks, the same up to rounding'
    """
    layers = " and ".join(names)
    return f"The output of {layers} is not made: its loss is taken in {chunks} chunks, the same up to rounding"


def kept_peak_bytes(account: BatchAccount) -> int:
    """The peak of a batch without a plan."""
    return simulate(account.whole).peak_bytes


def left_out(
    model: nn.Module,
    account: Callable[[LeanStep], BatchAccount],
    budget_bytes: int | None,
    plain: BatchAccount | None = None,
) -> LeftOut | None:
    """The outputs to leave out of a step; None where it fits with them, or nothing is gained.

    Args:
        model: The model.
        account: From layers to the account of the batch without their outputs, on fake tensors.
        budget_bytes: The budget; without one nothing is left out.
        plain: The account of the unchanged batch, where it is known.
    """
    candidates = LazyHeads(model).names
    if not candidates or budget_bytes is None:
        return None
    plain = plain or account(LeanStep())
    if kept_peak_bytes(plain) <= budget_bytes:
        return None
    tried = LeanStep(candidates)
    found = account(tried)
    chunks = {name: o.chunks for name, o in tried.outcomes.items() if o.chunks and not o.asked_by}
    if not chunks:
        return None
    if len(chunks) < len(candidates):
        found = account(LeanStep(tuple(chunks)))
    made = LeftOut(tuple(chunks), max(chunks.values()), plain, found)
    return made if made.saved_bytes > 0 else None
