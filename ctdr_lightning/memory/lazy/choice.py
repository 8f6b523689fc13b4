"""Which layers' outputs to leave out: those whose loss can be taken in chunks, where a step needs their bytes.

Left-out outputs take no time, but change sums by rounding. So they come before plans that take time, and after steps
that fit unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.lazy.logits import Outcome
from ctdr_lightning.memory.simulator.schedule import simulate

M = TypeVar("M", bound=nn.Module)

_BYTES_AN_OUTPUT = 12  # itself, its logarithmic probability and its gradient, in 32 bits


class LeavingOut:
    """The layers of a model and its copies whose outputs are left out in a step.

    Args:
        names: Of the layers; none by default. None is all large linear layers, those of factors included.

    Attributes:
        outcomes: What became of their outputs in the last step.
    """

    def __init__(self, names: tuple[str, ...] | None = ()) -> None:
        self.names = names
        self.outcomes: Mapping[str, Outcome] = {}

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[LazyHeads | None]:
        """Leave them out in the forward of a model, or of a copy of it."""
        if self.names == ():
            yield None
            return
        with LazyHeads(model, self.names) as heads:
            yield heads
        self.outcomes = heads.outcomes

    @property
    def outputs_bytes(self) -> int:
        """Bytes that the outputs of the last step would have taken with all that their loss makes of them."""
        return _BYTES_AN_OUTPUT * sum(outcome.n_outputs for outcome in self.outcomes.values())

    def step(self, step: Callable[[M, Any], Tensor]) -> Callable[[M, Any], Tensor]:
        """The same step without the outputs."""

        def without(model: M, batch: Any) -> Tensor:
            with self.of(model):
                return step(model, batch)

        return without


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
    account: Callable[[LeavingOut], BatchAccount],
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
    plain = plain or account(LeavingOut())
    if kept_peak_bytes(plain) <= budget_bytes:
        return None
    tried = LeavingOut(candidates)
    found = account(tried)
    chunks = {name: o.chunks for name, o in tried.outcomes.items() if o.chunks and not o.asked_by}
    if not chunks:
        return None
    if len(chunks) < len(candidates):
        found = account(LeavingOut(tuple(chunks)))
    made = LeftOut(tuple(chunks), max(chunks.values()), plain, found)
    return made if made.saved_bytes > 0 else None
