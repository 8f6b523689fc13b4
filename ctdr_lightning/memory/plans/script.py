"""What the tape does at each forward op so that exactly the plan's values are dropped."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ctdr_lightning.memory.plans.actions import Actions, Recompute, action_of, dropped_values
from ctdr_lightning.memory.traces.op_kinds import TRACKED_VIEWS
from ctdr_lightning.memory.traces.trace import OpRecord, Trace

STAYS = {"kept", "no", "awaited", "needed"}


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """What the tape does at one forward op.

    Attributes:
        op: Name of the op that is expected.
        shape: Shape of its first output, to notice a step that differs.
        replay: Whether its outputs are dropped and made again by running it once more.
        stays: For each output of a replayed op: ``"kept"`` (held from the start), or whether it stays once replayed:
            ``"no"``,
            ``"awaited"`` (for as long as autograd awaits it) or ``"needed"`` (for as long as any replay may read it).
        saves: Whether autograd saves, between this op and the next, anything that is dropped.
        region: How many forwards of modules have begun before it; -1 where that is not known.
        writes: Whether it writes over something in a storage that a replay reads.
    """

    op: str
    shape: tuple[int, ...]
    replay: bool = False
    stays: tuple[str, ...] = ()
    saves: bool = True
    region: int = -1
    writes: bool = False


def write_script(trace: Trace, actions: Actions) -> tuple[ScriptLine, ...]:
    """What the tape does at each forward op so that exactly the plan's values are dropped."""
    dropped = dropped_values(trace, actions)
    saving, written = _saving_ops(trace, dropped), _writing_ops(trace, dropped)
    lines = []
    for place, index in enumerate(trace.forward_ops):
        op, saves, writes = trace.ops[index], place in saving, index in written
        first = op.outputs[0] if op.outputs else -1
        shape = trace.values[first].shape if first >= 0 and trace.values[first].op == index else ()
        if dropped.isdisjoint(op.outputs) or _is_plain_view(trace, op):
            lines.append(ScriptLine(op.name, shape, saves=saves, region=op.region, writes=writes))
        else:
            stays = tuple(_stays(trace, actions, v) for v in op.outputs)
            lines.append(ScriptLine(op.name, shape, True, stays, saves, op.region, writes))
    return tuple(lines)


def _is_plain_view(trace: Trace, op: OpRecord) -> bool:
    """Whether the tape finds what the op makes by itself: a view of something that was not written in place."""
    if op.name not in TRACKED_VIEWS:
        return False
    record = trace.values[op.outputs[0]]
    return record.op >= 0 and trace.storages[record.storage].born == trace.ops[record.op].tick


def _saving_ops(trace: Trace, values: set[int]) -> set[int]:
    """Places in the forward after which autograd saves one of the values."""
    ticks = [trace.ops[index].tick for index in trace.forward_ops]
    return {bisect_right(ticks, save.packed) - 1 for v in values for save in trace.values[v].saves}


def _writing_ops(trace: Trace, dropped: set[int]) -> set[int]:
    """Ops that write over something in a storage which a replay reads or makes."""
    read = {source for v in dropped for source in trace.ops[trace.values[v].op].inputs}
    places = {trace.values[v].storage for v in read | dropped}
    written = (v for v in trace.values if v.storage in places and v.op >= 0)
    return {v.op for v in written if trace.storages[v.storage].born != trace.ops[v.op].tick}


def _stays(trace: Trace, actions: Actions, value: int) -> str:
    if value < 0:
        return "no"
    action = action_of(trace, actions, value)
    if not isinstance(action, Recompute):
        return "kept"
    if not action.stays:
        return "no"
    return "awaited" if trace.values[value].saves else "needed"
