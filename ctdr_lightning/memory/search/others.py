"""Further actions of single values, in addition to keeping and recomputing: a codec, a link, a codec on a link.

Exact codecs come first where they cost next to nothing: a dropout mask to bits, pooling indices to 16 bits, a ReLU that
is read by its sign alone to bits. A value with such a codec moves in it. Other codecs are choices if the user asked for
them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ctdr_lightning.memory.search.frontier import Others
from ctdr_lightning.memory.simulator.actions import KEEP, Action, Actions, Compress, Offload, Recompute, action_of
from ctdr_lightning.memory.simulator.away import away_bytes, codec_cost
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.facts import Facts, facts_of
from ctdr_lightning.memory.traces.machine import CodecCost
from ctdr_lightning.memory.traces.trace import Trace

# A codec is free if its bytes follow from the value's kind. Zero-value compression is not among them: it depends on
# contents, and takes about as long as reading a disk (0.6 GB/s to encode on a core).
FREE_KINDS = ("two_valued", "bool", "index", "sign_only")


def others_of(step: Prepared, codecs: Iterable[CodecCost]) -> Others:
    """The other actions of each saved value that has any.

    Args:
        step: The recorded step, with its links.
        codecs: Those that may be used.
    """
    trace, costs, found = step.trace, list(codecs), dict[int, tuple[Action, ...]]()
    for value in trace.saved:
        facts = facts_of(trace)[value]
        if facts.movable:
            free = _free_codec(costs, facts)
            held = [Compress((free,))] if free else _asked(costs, facts)
            moved = [Offload(link.to, (free,) if free else ()) for link in trace.links]
            if held or moved:
                found[value] = (*held, *moved)
    return found


def moved_to(others: Others, holder: str) -> dict[int, Action]:
    """Of other actions those that move values to a holder."""
    return {v: a for v, found in others.items() for a in found if isinstance(a, Offload) and a.to == holder}


def free_codecs(trace: Trace) -> dict[int, Action]:
    """An exact codec for every value that one makes smaller at next to no cost."""
    found: dict[int, Action] = {}
    for value in trace.saved:
        codec = _free_codec(trace.codecs, facts_of(trace)[value])
        if codec:
            found[value] = Compress((codec,))
    return found


def _free_codec(costs: Iterable[CodecCost], facts: Facts) -> str:
    fitting = [c for c in costs if c.exact and c.needs in facts.kinds and c.needs in FREE_KINDS]
    return min(fitting, key=lambda c: c.payload_bits).name if fitting else ""


def _asked(costs: Iterable[CodecCost], facts: Facts) -> list[Compress]:
    return [Compress((c.name,)) for c in costs if not c.only_faster and c.needs in facts.kinds]


def codecs_may_pay(step: Prepared, actions: Actions, codecs: Actions) -> bool:
    """Whether the cheapest codec takes less time for a byte than the dearest recomputation in a plan.

    Where none does, no plan with codecs was found to be faster, on ViT, BERT, GPT-2, GoogLeNet and SqueezeNet.

    Args:
        step: The recorded step.
        actions: A plan without codecs.
        codecs: A codec for each value that has one.
    """
    trace, made = step.trace, Simulator(step, actions)
    dropped = [v for v in trace.saved if isinstance(action_of(trace, actions, v), Recompute)]
    holdable = [v for v in dropped if v not in trace.unholdable and trace.value_bytes(v)]
    dearest = max((-made.trial({v: KEEP}).seconds / trace.value_bytes(v) for v in holdable), default=0.0)
    return any(_price(trace, v, codec) < dearest for v, codec in codecs.items() if isinstance(codec, Compress))


def _price(trace: Trace, value: int, codec: Compress) -> float:
    """Seconds of encoding and decoding a value, for each byte that it spares."""
    dense, costs = trace.value_bytes(value), [codec_cost(trace, name) for name in codec.codecs]
    zeros = facts_of(trace)[value].zeros
    seconds = sum(cost.encode_seconds(dense, zeros) + cost.decode_seconds(dense, zeros) for cost in costs)
    return seconds / max(dense - away_bytes(trace, value, codec.codecs), 1)
