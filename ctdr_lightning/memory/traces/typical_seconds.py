"""Seconds that planning can trust: a single timing of one op is noise, the median over equal ops is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import median

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.traces.trace import OpRecord, Trace


def steady(traces: Sequence[Trace]) -> Trace:
    """One trace of several recordings of the same step.

    Each op gets the median of all ops of its kind and shapes, in all recordings, and Python's time is a median as well.
    Also worth while for a single one.

    Args:
        traces: Recordings with the same ops; of three or more the first is left out if it alone has others, as where a
            step makes something once.

    Raises:
        ConfigError: If there is none, or when they differ in their ops.
    """
    names = [[op.name for op in trace.ops] for trace in traces]
    if len(traces) > 2 and names[0] != names[1]:
        traces, names = traces[1:], names[1:]
    if any(found != names[-1] for found in names) or not traces:
        raise ConfigError(f"traces: {len(traces)} recordings do not show the same ops.", "Record the same step again.")
    last = traces[-1]
    kinds = [_kind(last, op) for op in last.ops]
    taken: dict[Hashable, list[float]] = defaultdict(list)
    for trace in traces:
        for kind, op in zip(kinds, trace.ops, strict=True):
            taken[kind].append(op.seconds)
    typical = {kind: median(seconds) for kind, seconds in taken.items()}
    return last.with_costs([typical[kind] for kind in kinds], {}, median(trace.python_s_per_replay for trace in traces))


def _kind(trace: Trace, op: OpRecord) -> Hashable:
    """Grouping key for an op's time: its name and the tensors that it reads and writes."""
    shapes = tuple((trace.values[v].shape, trace.values[v].dtype) for v in (*op.inputs, *op.outputs) if v >= 0)
    return op.name, shapes, op.backward
