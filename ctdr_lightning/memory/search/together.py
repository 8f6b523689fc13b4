"""Keep, recompute, offload and compress in one plan: a plan of keep and recompute, improved by what can be put away.

Exact codecs come first where they cost next to nothing: a dropout mask to bits, pooling indices to 16 bits, a ReLU that
is read by its sign alone to bits. Then values that are live at the peak go away, the earliest made first, as those have
the longest way to hide their transfers in; until the peak fits. It is tried from both ends: from the plain step, so
that everything is moved, and from plans that recompute more and more, so that little is; the simulator judges all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ctdr_lightning.memory.plans.actions import KEEP, Action, Actions, Compress, Offload, Recompute, action_of
from ctdr_lightning.memory.simulator.away import away_bytes, codec_cost
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.traces.facts import Facts, facts_of
from ctdr_lightning.memory.traces.machine import CodecCost
from ctdr_lightning.memory.traces.trace import Trace

# A codec is free if its bytes follow from the value's kind. Zero-value compression is not among them: it depends on
# contents, and takes about as long as reading a disk (0.6 GB/s to encode on a core).
FREE_KINDS = ("two_valued", "bool", "index", "sign_only")
# Rounds of "send what is live at the peak, settle the ticks, look for the new peak". On BIG and the nets of
# benchmarks/offload.py all that ever fitted did so in 10 rounds.
ROUNDS = 16
# Values below this share of the plain step's bytes are not worth a transfer: all of them together hardly count.
WORTH_MOVING = 0.004


def free_codecs(trace: Trace) -> dict[int, Action]:
    """An exact codec for every value that one makes smaller at next to no cost."""
    found: dict[int, Action] = {}
    for value in trace.saved:
        codec = _best_codec(trace.codecs, facts_of(trace)[value])
        if codec is not None:
            found[value] = Compress((codec,))
    return found


def _best_codec(costs: Iterable[CodecCost], facts: Facts) -> str | None:
    fitting = [c for c in costs if c.exact and c.needs in facts.kinds and c.needs in FREE_KINDS]
    best = min(fitting, key=lambda c: c.payload_bits, default=None)
    return None if best is None else best.name


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
    seconds = sum(cost.encode_seconds(dense) + cost.decode_seconds(dense) for cost in costs)
    return seconds / max(dense - away_bytes(trace, value, codec.codecs), 1)


def put_away(step: Prepared, starts: Iterable[Actions], limit_bytes: int) -> Iterator[Actions]:
    """Plans that also move and compress, for a peak.

    Args:
        step: The recorded step, with the links and codecs that may be used; without any nothing is yielded.
        starts: Plans of keep and recompute to go on from.
        limit_bytes: The peak that is wanted.

    Yields:
        Plans, their ticks settled; also such that do not fit after all.
    """
    trace = step.trace
    codecs = free_codecs(trace)
    if not codecs and not trace.links:
        return
    for start in starts:
        smaller = _with_codecs(trace, start, codecs)
        if Simulator(step, smaller).peak_bytes <= limit_bytes:
            yield smaller
            continue
        for link in trace.links:
            yield _send_until_it_fits(step, smaller, link.to, limit_bytes)
        yield smaller


def _with_codecs(trace: Trace, start: Actions, codecs: dict[int, Action]) -> dict[int, Action]:
    """A plan with codecs on everything that it keeps."""
    kept = {v: c for v, c in codecs.items() if not isinstance(action_of(trace, start, v), Recompute)}
    return dict(start) | kept


def _send_until_it_fits(step: Prepared, start: dict[int, Action], to: str, limit_bytes: int) -> dict[int, Action]:
    """Send what is live at the peak away, until the peak fits or nothing helps."""
    trace = step.trace
    least = WORTH_MOVING * (step.plain_peak_bytes - trace.resident_bytes)
    left = [v for v in trace.saved if _can_go(trace, start, v) and trace.value_bytes(v) >= least]
    actions, best = dict(start), dict(start)
    simulator = Simulator(step, actions)
    best_peak = simulator.peak_bytes
    for _ in range(ROUNDS):
        if simulator.peak_bytes <= limit_bytes:
            return actions
        sent = _live_at(simulator, left, simulator.timeline().peak_tick, simulator.peak_bytes - limit_bytes)
        if not sent:
            break
        left = [v for v in left if v not in sent]
        actions = scheduled(step, {**_reopened(actions), **{v: Offload(to) for v in sent}})
        simulator = Simulator(step, actions)
        if simulator.peak_bytes < best_peak:
            best, best_peak = actions, simulator.peak_bytes
    return best


def _can_go(trace: Trace, start: Actions, value: int) -> bool:
    kept = not isinstance(action_of(trace, start, value), (Recompute, Compress))
    return kept and facts_of(trace)[value].movable


def _live_at(simulator: Simulator, values: list[int], tick: int, excess_bytes: int) -> list[int]:
    """Of values that autograd alone holds at a tick the earliest made, until they make up for an excess."""
    found: list[int] = []
    trace = simulator.trace
    for value in sorted(values, key=lambda v: trace.values[v].op):
        needed = simulator.needed(value)[0]
        made = trace.ops[trace.values[value].op].tick
        alone = trace.storages[trace.values[value].storage].end < tick
        if excess_bytes > 0 and needed is not None and made < tick < needed and alone:
            found.append(value)
            excess_bytes -= trace.value_bytes(value)
    return found


def _reopened(actions: Actions) -> dict[int, Action]:
    """The same actions with the ticks of transfers open: they are settled together, as they share a lane."""
    return {v: Offload(a.to, a.codecs) if isinstance(a, Offload) else a for v, a in actions.items()}
