"""What happens to one saved value between its forward and its backward use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ctdr_lightning.memory.traces.trace import Trace

KINDS = ("keep", "recompute", "offload", "compress")


@dataclass(frozen=True, slots=True)
class Action:
    """What happens to one value.

    Attributes:
        kind: ``"keep"``, ``"recompute"``, ``"offload"`` or ``"compress"``.
        cache: Recompute only: hold the value after its first replay for its next use (speed-centric), or make it again
            each
            time (memory-centric).
        holder: Where an offloaded or compressed value waits.
    """

    kind: str
    cache: bool = True
    holder: str = ""


KEEP = Action("keep")
RECOMPUTE = Action("recompute")
RECOMPUTE_EACH = Action("recompute", cache=False)
Actions = Mapping[int, Action]


def action_of(trace: Trace, actions: Actions, value: int) -> Action:
    """A value's action: as given, else keep for what autograd saved; what it did not is made again each time.

    Values that may not be recomputed are kept whatever is asked; those that are written over cannot be held.
    """
    if value not in trace.droppable:
        return KEEP
    given = actions.get(value)
    if given is not None:
        return RECOMPUTE if given.kind == "keep" and value in trace.fleeting else given
    return KEEP if trace.values[value].saves else RECOMPUTE_EACH


def dropped_values(trace: Trace, actions: Actions) -> set[int]:
    """Every value that a plan makes again: what it drops, and what is needed on the way back to what it keeps."""
    stack = [v for v in trace.saved if action_of(trace, actions, v).kind == "recompute"]
    found: set[int] = set()
    while stack:
        value = stack.pop()
        if value in found or action_of(trace, actions, value).kind != "recompute":
            continue
        found.add(value)
        stack.extend(trace.ops[trace.values[value].op].inputs)
    return found
