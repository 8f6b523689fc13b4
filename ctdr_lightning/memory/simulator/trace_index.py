"""A trace as plain lists, for those who play its backward very often."""

from __future__ import annotations

from ctdr_lightning.memory.traces.trace import Trace

UNPACK, RELEASE = 0, 1


class TraceIndex:
    """The data of a trace that playing a backward needs, as plain lists, because it is played very often.

    Attributes:
        n_ticks: Length of the time axis.
        seconds: For each op the time to run it once more.
        temps: For each op its workspace.
        sources: For each op the values that it reads.
        made: For each op the values that it makes (a view makes none).
        op_of: For each value its op; -1 for one from before the step.
        n_bytes: For each value the size of its allocation.
        alive_until: For each value the last tick at which the program itself still has it.
        saved: For each value whether autograd saves it.
        n_saves: For each value how many of autograd's handles hold it.
        released: For each value the last tick at which one does; -1 where none ever does.
        droppable: For each value whether it may be recomputed.
        near: For each droppable value the droppable values that share an op call with it.
        events: For each value when autograd asks for it and lets go of it.
    """

    def __init__(self, trace: Trace) -> None:
        self.n_ticks = trace.n_ticks
        self.seconds = [trace.replay_seconds(index) for index in range(len(trace.ops))]
        self.temps = [op.temp_bytes for op in trace.ops]
        self.sources = [op.inputs for op in trace.ops]
        self.op_of = [v.op for v in trace.values]
        self.made = [
            [v for v in dict.fromkeys(op.outputs) if v >= 0 and self.op_of[v] == i] for i, op in enumerate(trace.ops)
        ]
        self.n_bytes = [trace.storages[v.storage].n_bytes for v in trace.values]
        self.alive_until = [min(trace.storages[v.storage].end, v.overwritten_at - 1) for v in trace.values]
        self.saved = [bool(v.saves) for v in trace.values]
        self.released = [max((s.released for s in v.saves), default=-1) for v in trace.values]
        self.droppable = [v in trace.droppable for v in range(len(trace.values))]
        self.near = self._find_near(trace)
        self.n_saves = [len(v.saves) for v in trace.values]
        self.events = [
            tuple(
                event
                for s in v.saves
                for event in (*((t, UNPACK, i, s.released) for t in s.unpacked), (s.released, RELEASE, i, 0))
            )
            for i, v in enumerate(trace.values)
        ]

    def _find_near(self, trace: Trace) -> list[tuple[int, ...]]:
        near: list[set[int]] = [set() for _ in self.op_of]
        for op in trace.forward_ops:
            made = [v for v in self.made[op] if self.droppable[v]]
            called = {*made, *(v for v in self.sources[op] if self.droppable[v])} if made else set()
            for value in called:
                near[value] |= called if value in made else set(made)
        return [tuple(sorted(found - {value})) for value, found in enumerate(near)]
