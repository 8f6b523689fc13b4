"""Which ticks of the backward a tape hears: those at which autograd asks for a tensor that it handed out itself."""

from __future__ import annotations

from bisect import bisect_right

from ctdr_lightning.memory.traces.trace import Save, Trace


def bells_of(trace: Trace) -> dict[int, int]:
    """From each tick of the backward that can be heard to the place in the forward where the bell is hung.

    A tape tells saves apart by the op after which they were made alone. So a place is of use where everything that is
    saved there is asked for together: by one node of autograd, with no op in between.
    """
    return trace.once("bells", lambda: _find(trace))


def heard_before(trace: Trace, tick: int, otherwise: int) -> int:
    """The last tick up to a given one at which a tape can act in the backward.

    Args:
        trace: The recorded step.
        tick: Up to which.
        otherwise: The answer where it hears none.
    """
    heard = trace.once("heard", lambda: sorted(bells_of(trace)))
    place = bisect_right(heard, tick) - 1
    return heard[place] if place >= 0 else otherwise


def _find(trace: Trace) -> dict[int, int]:
    op_ticks = [op.tick for op in trace.ops]
    places = [trace.ops[index].tick for index in trace.forward_ops]
    saves: dict[int, list[Save]] = {}
    for value in trace.values:
        for save in value.saves:
            saves.setdefault(bisect_right(places, save.packed) - 1, []).append(save)
    found: dict[int, int] = {}
    for place, here in saves.items():
        asked = [min(save.unpacked, default=-1) for save in here]
        first, last = min(asked), max(asked)
        together = bisect_right(op_ticks, last) == bisect_right(op_ticks, first)
        if place >= 0 and first > places[-1] and together:
            found[first] = place
    return found
