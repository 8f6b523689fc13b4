"""What happens to one saved value between its forward and its backward use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ctdr_lightning.memory.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Keep:
    """The value is held, as plain autograd does."""

    kind: ClassVar[str] = "keep"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The value is dropped, and made again where the backward or another replay needs it.

    Attributes:
        stays: Whether it stays after its first replay for its next use (speed-centric), or is made again each time
            (memory-centric).
    """

    kind: ClassVar[str] = "recompute"
    stays: bool = True


Action = Keep | Recompute
KEEP = Keep()
RECOMPUTE = Recompute()
RECOMPUTE_EACH = Recompute(stays=False)
Actions = Mapping[int, Action]


def action_of(trace: Trace, actions: Actions, value: int) -> Action:
    """A value's action: as given, else keep for what autograd saved; what it did not is made again each time.

    Values that may not be recomputed are kept whatever is asked; those that are written over cannot be held.
    """
    if value not in trace.droppable:
        return KEEP
    given = actions.get(value)
    if given is not None:
        return RECOMPUTE if isinstance(given, Keep) and value in trace.fleeting else given
    return KEEP if trace.values[value].saves else RECOMPUTE_EACH


def dropped_values(trace: Trace, actions: Actions) -> set[int]:
    """Every value that a plan makes again: what it drops, and what is needed on the way back to what it keeps."""
    stack = [v for v in trace.saved if isinstance(action_of(trace, actions, v), Recompute)]
    found: set[int] = set()
    while stack:
        value = stack.pop()
        if value in found or not isinstance(action_of(trace, actions, value), Recompute):
            continue
        found.add(value)
        stack.extend(trace.ops[trace.values[value].op].inputs)
    return found
