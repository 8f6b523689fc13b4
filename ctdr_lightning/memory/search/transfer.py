"""A plan's actions for another step of the same structure: other sizes, the same ops in the same order."""

from __future__ import annotations

from collections.abc import Hashable

from ctdr_lightning.memory.plans.actions import Actions, Keep
from ctdr_lightning.memory.traces.trace import Trace


def structure_of(trace: Trace) -> Hashable:
    """Everything of a trace but its sizes and seconds: two traces of one structure share their value ids. Linear."""
    ops = tuple((op.name, op.inputs, op.outputs, op.backward) for op in trace.ops)
    values = tuple((v.storage, v.op, len(v.saves), bool(v.pin)) for v in trace.values)
    return hash((ops, values)), len(ops), len(values)


def transferred(actions: Actions, target: Trace) -> Actions:
    """The actions that mean the same for a trace of the same structure.

    What the target writes over cannot be held there, and is left to its default.
    """
    droppable, fleeting = target.droppable, target.fleeting
    return {v: a for v, a in actions.items() if v in droppable and not (isinstance(a, Keep) and v in fleeting)}
