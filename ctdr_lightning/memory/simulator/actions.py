"""Actions: the treatment of one saved value between its forward and its backward use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ctdr_lightning.memory.traces.facts import facts_of
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


@dataclass(frozen=True, slots=True)
class Offload:
    """The value waits in another place.

    Attributes:
        to: Name of the holder.
        codecs: Codecs that compress it on its way, in this order.
        out_at: Tick of the forward op after which it is sent; -1 sends it as soon as its op has run.
        gone_by: Tick of the forward op after which the step waits until it is away and its memory free; -1 leaves it to
            ``scheduled``, which takes the first op by which it is away anyway.
        back_at: Tick at which it is asked back, into memory that is taken from then on; -1 leaves it to ``scheduled``,
            which takes the latest that hides the transfer.
    """

    kind: ClassVar[str] = "offload"
    to: str
    codecs: tuple[str, ...] = ()
    out_at: int = -1
    gone_by: int = -1
    back_at: int = -1


@dataclass(frozen=True, slots=True)
class Compress:
    """The value waits here, in fewer bytes.

    Attributes:
        codecs: Codecs that compress it, in this order.
    """

    kind: ClassVar[str] = "compress"
    codecs: tuple[str, ...]


Action = Keep | Recompute | Offload | Compress
Away = Offload | Compress
KEEP = Keep()
RECOMPUTE = Recompute()
RECOMPUTE_EACH = Recompute(stays=False)
Actions = Mapping[int, Action]


def action_of(trace: Trace, actions: Actions, value: int) -> Action:
    """A value's action: the given one, else keep for a saved value and recompute at each use for any other.

    Values that may be neither recomputed nor put away are always kept; values that are written over cannot be held.
    """
    given = actions.get(value)
    if isinstance(given, (Offload, Compress)):
        if facts_of(trace)[value].movable:
            return given
        given = None
    if value not in trace.droppable:
        return KEEP
    if given is not None:
        return RECOMPUTE if isinstance(given, Keep) and value in trace.unholdable else given
    return KEEP if trace.values[value].saves else RECOMPUTE_EACH


def away_values(trace: Trace, actions: Actions) -> dict[int, Away]:
    """Every value that a plan puts away.

    A codec that keeps no more than the sign gives back other contents, which no replay may read: where one would, the
    value is kept.
    """
    found = {v: a for v, a in actions.items() if isinstance(a, (Offload, Compress)) and facts_of(trace)[v].movable}
    if not any(keeps_sign_alone(action) for action in found.values()):
        return found
    read = {source for v in dropped_values(trace, actions) for source in trace.ops[trace.values[v].op].inputs}
    return {v: a for v, a in found.items() if v not in read or not keeps_sign_alone(a)}


def keeps_sign_alone(action: Action) -> bool:
    """Whether a value comes back with other contents than it had, of which the backward reads the sign."""
    return isinstance(action, (Offload, Compress)) and "sign" in action.codecs


def dropped_values(trace: Trace, actions: Actions) -> set[int]:
    """Every value that a plan recomputes: the dropped ones, and those on the way back to kept ones."""
    stack = [v for v in trace.saved if isinstance(action_of(trace, actions, v), Recompute)]
    found: set[int] = set()
    while stack:
        value = stack.pop()
        if value in found or not isinstance(action_of(trace, actions, value), Recompute):
            continue
        found.add(value)
        stack.extend(trace.ops[trace.values[value].op].inputs)
    return found


def unproven_sources(trace: Trace, actions: Actions, wrong: set[int], right: set[int]) -> set[int]:
    """The values that may be why others came back wrong: these, and all that the ops on the way to them make.

    Args:
        trace: The step.
        actions: Its plan.
        wrong: Values that came back with other contents.
        right: Values that came back as they were.
    """
    dropped = dropped_values(trace, actions) | away_values(trace, actions).keys()
    stack, found = [v for v in wrong if v >= 0], set[int]()
    while stack:
        value = stack.pop()
        if value in found:
            continue
        found.add(value)
        op = trace.values[value].op
        if op >= 0:
            found.update(v for v in trace.ops[op].outputs if v >= 0)
            stack.extend(v for v in trace.ops[op].inputs if v in dropped and v not in right)
    return found


def first_wrong(trace: Trace, actions: Actions, wrong: set[int], right: set[int]) -> set[int]:
    """Values that came back wrong and were not made again from another such value.

    Args:
        trace: The step.
        actions: Its plan.
        wrong: Values that came back with other contents.
        right: Values that came back as they were.
    """
    again = (dropped_values(trace, actions) | away_values(trace, actions).keys()) - right
    found, follows = {v for v in wrong if v < 0}, set[int]()
    for index in trace.forward_ops:
        op = trace.ops[index]
        made = wrong.intersection(op.outputs)
        behind = not follows.isdisjoint(op.inputs)
        if not behind:
            found |= made
        if behind or made:
            follows.update(again.intersection(op.outputs))
    return found
