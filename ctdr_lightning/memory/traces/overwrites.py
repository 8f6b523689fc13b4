"""Values that cannot be recomputed, because their sources are overwritten before the backward."""

from __future__ import annotations

from dataclasses import replace

from ctdr_lightning.memory.traces.trace import Trace


def pin_what_cannot_wait(trace: Trace) -> Trace:
    """Pin values that cannot be recomputed because a tensor is overwritten meanwhile.

    These are values that autograd awaits although their storage is written (unnoticed, through ``.data``), and values
    with a source that neither can be recomputed nor stays unchanged.
    """
    released = [max((s.released for s in v.saves), default=-1) for v in trace.values]
    need = _last_needs(trace, released)
    pins = [
        v.pin or ("overwritten while autograd awaits it" if v.overwritten_at < until else "")
        for v, until in zip(trace.values, released, strict=True)
    ]
    for index, op in enumerate(trace.ops):
        made = [v for v in op.outputs if v >= 0 and trace.values[v].op == index]
        until = max((need[v] for v in made), default=-1)
        for source in op.inputs:
            record = trace.values[source]
            if record.overwritten_at < until and (record.op < 0 or pins[source] or record.saves):
                for v in made:
                    pins[v] = pins[v] or "reads a tensor that is overwritten before the backward"
    return replace(trace, values=tuple(replace(v, pin=pin) for v, pin in zip(trace.values, pins, strict=True)))


def _last_needs(trace: Trace, released: list[int]) -> list[int]:
    """For each value, the last tick at which a replay could read it, if all without a pin were dropped."""
    need = list(released)
    for index in reversed(range(len(trace.ops))):
        op = trace.ops[index]
        made = [v for v in op.outputs if v >= 0 and trace.values[v].op == index and not trace.values[v].pin]
        until = max((need[v] for v in made), default=-1)
        for source in op.inputs:
            need[source] = max(need[source], until)
    return need
