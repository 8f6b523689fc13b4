"""Script of the tape: its work at each forward op, so that exactly the plan's values are dropped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from ctdr_lightning.memory.simulator.actions import (
    Actions,
    Away,
    Offload,
    Recompute,
    action_of,
    away_values,
    dropped_values,
)
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.foreseen import FORESEEN
from ctdr_lightning.memory.traces.op_kinds import TRACKED_VIEWS
from ctdr_lightning.memory.traces.trace import WEIGHT, OpRecord, Trace

STAYS = {"kept", "no", "awaited", "needed"}


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """The tape's work at one forward op.

    Attributes:
        op: Name of the op that is expected.
        shape: Shape of its first output, to notice a step that differs; empty where it was not seen.
        replay: Whether its outputs are dropped and made again by running it once more.
        stays: For each output of a replayed op: ``"kept"`` (held from the start), or whether it stays once replayed:
            ``"no"``,
            ``"awaited"`` (for as long as autograd awaits it) or ``"needed"`` (for as long as any replay may read it).
        saves: Whether autograd saves, between this op and the next, anything that is dropped.
        region: How many forwards of modules have begun before it; -1 where that is not known.
        writes: Whether it writes over something in a storage that a replay reads.
        tick: When it runs, in the trace's time.
        sends: ``(output, value id)`` of each of its outputs that is put away.
        marked: Whether something is sent, or must be gone, once it has run.
        bell: Tick of the backward that the tape hears when a save after this op is requested; -1 if none is needed.
        exposed: Whether its replay reads a tensor from before the step, no weight, that autograd did not save. A step
            that differs may write over such a tensor unnoticed where plain autograd would not mind.
    """

    op: str
    shape: tuple[int, ...]
    replay: bool = False
    stays: tuple[str, ...] = ()
    saves: bool = True
    region: int = -1
    writes: bool = False
    tick: int = -1
    sends: tuple[tuple[int, ...], ...] = ()
    marked: bool = False
    bell: int = -1
    exposed: bool = False

    @property
    def busy(self) -> bool:
        """Whether the tape must see the op."""
        return self.replay or self.writes or self.marked or bool(self.sends) or self.bell >= 0


def write_script(trace: Trace, actions: Actions) -> tuple[ScriptLine, ...]:
    """Derive the tape's work at each forward op, so that exactly the plan's values are dropped and put away."""
    dropped, away = dropped_values(trace, actions), away_values(trace, actions)
    absent = dropped | away.keys()
    saving, written = _saving_ops(trace, absent), _writing_ops(trace, dropped, absent)
    marks, bells = _marked_ticks(away), _bells(trace, away)
    lines = []
    for place, index in enumerate(trace.forward_ops):
        op = trace.ops[index]
        first = op.outputs[0] if op.outputs else -1
        seen = first >= 0 and trace.values[first].op == index and FORESEEN not in trace.meta
        shape = trace.values[first].shape if seen else ()
        sends = tuple((i, v) for i, v in enumerate(op.outputs) if v in away and trace.values[v].op == index)
        # Views of a value that is put away are recomputed like any other; only its own op is not the tape's to replay.
        again = {v for v in op.outputs if v in dropped or (v in away and trace.values[v].op != index)}
        replay = bool(again) and not _is_plain_view(trace, op)
        lines.append(
            ScriptLine(
                op.name,
                shape,
                replay,
                tuple(_stays(trace, actions, away, v) for v in op.outputs) if replay else (),
                place in saving or place in bells,
                op.region,
                index in written,
                op.tick,
                sends,
                op.tick in marks,
                bells.get(place, -1),
                replay and _is_exposed(trace, op),
            )
        )
    return tuple(lines)


def _marked_ticks(away: Mapping[int, Away]) -> set[int]:
    """Ticks of the forward at which something is sent or must be gone."""
    offloads = [action for action in away.values() if isinstance(action, Offload)]
    return {action.out_at for action in offloads} | {action.gone_by for action in offloads}


def _bells(trace: Trace, away: Mapping[int, Away]) -> dict[int, int]:
    """From places in the forward to the tick that is heard of them, for all ticks at which something returns."""
    wanted = {action.back_at for action in away.values() if isinstance(action, Offload)}
    return {place: tick for tick, place in bells_of(trace).items() if tick in wanted}


def _is_exposed(trace: Trace, op: OpRecord) -> bool:
    sources = (trace.values[v] for v in op.inputs)
    return any(s.op < 0 and not s.saves and s.pin != WEIGHT for s in sources)


def _is_plain_view(trace: Trace, op: OpRecord) -> bool:
    """Whether the tape finds the op's output by itself: a view of something that was not written in place."""
    if op.name not in TRACKED_VIEWS:
        return False
    record = trace.values[op.outputs[0]]
    return record.op >= 0 and trace.storages[record.storage].born == trace.ops[record.op].tick


def _saving_ops(trace: Trace, values: set[int]) -> set[int]:
    """Places in the forward after which autograd saves one of the values."""
    ticks = [trace.ops[index].tick for index in trace.forward_ops]
    return {bisect_right(ticks, save.packed) - 1 for v in values for save in trace.values[v].saves}


def _writing_ops(trace: Trace, dropped: set[int], absent: set[int]) -> set[int]:
    """Ops that write over something in a storage which a replay reads or makes, or from which something is sent."""
    read = {source for v in dropped for source in trace.ops[trace.values[v].op].inputs}
    places = {trace.values[v].storage for v in read | absent}
    written = (v for v in trace.values if v.storage in places and v.op >= 0)
    return {v.op for v in written if trace.storages[v.storage].born != trace.ops[v.op].tick}


def _stays(trace: Trace, actions: Actions, away: Mapping[int, Away], value: int) -> str:
    if value < 0:
        return "no"
    if value in away:
        return "awaited"
    action = action_of(trace, actions, value)
    if not isinstance(action, Recompute):
        return "kept"
    if not action.stays:
        return "no"
    return "awaited" if trace.values[value].saves else "needed"
