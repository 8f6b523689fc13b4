"""A plan's actions for another step of the same structure: other sizes, the same ops in the same order."""

from __future__ import annotations

from collections.abc import Hashable

from ctdr_lightning.memory.simulator.actions import Action, Actions, Compress, Keep, Offload
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.trace import Trace


def structure_of(trace: Trace) -> Hashable:
    """Everything of a trace but its sizes and seconds: two traces of one structure share their value ids. Linear."""
    ops = tuple((op.name, op.inputs, op.outputs, op.backward) for op in trace.ops)
    values = tuple((v.storage, v.op, len(v.saves), bool(v.pin)) for v in trace.values)
    return hash((ops, values)), len(ops), len(values)


def transferred(actions: Actions, target: Trace) -> Actions:
    """The actions that mean the same for a trace of the same structure.

    Values that the target writes over cannot be held there and get their default; so do values that cannot be put away
    there: an index of a larger plane may not be short.
    """
    return {value: action for value, action in actions.items() if _means_the_same(target, value, action)}


def _means_the_same(target: Trace, value: int, action: Action) -> bool:
    if isinstance(action, (Offload, Compress)):
        facts, needs = facts_of(target)[value], {cost.name: cost.needs for cost in target.codecs}
        there = isinstance(action, Compress) or any(link.to == action.to for link in target.links)
        return facts.movable and there and all(needs.get(codec) in facts.kinds for codec in action.codecs)
    return value in target.droppable and not (isinstance(action, Keep) and value in target.unholdable)
