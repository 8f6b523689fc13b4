"""Effect of putting a value away: the ticks at which its memory is free and taken again, the cost of codecs."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.simulator.actions import Away, Offload
from ctdr_lightning.memory.traces.facts import Facts, facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.traces.trace import Trace

# The share of zeros differs from step to step. With 10 % more elements than were seen to be left, no net of
# benchmarks/offload.py had a measured peak above the simulated one.
MORE_ELEMENTS = 1.1
_MEASURED_ITEM_BYTES = 4  # codecs of floats were measured on float32
Interval = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AwayEffect:
    """Effect of one value that is put away on the timeline.

    Attributes:
        gone: Last tick at which its memory is held for its sake.
        needed: First tick at which it is read afterwards; None where it never is.
        intervals: ``(first tick, last tick, bytes)`` of the memory held in its place.
        seconds: Compute time of the step: its codecs', and the step's own share of moving it.
        decode_s: The part of ``seconds`` that is spent on the way back.
    """

    gone: int
    needed: int | None
    intervals: tuple[Interval, ...]
    seconds: float = 0.0
    decode_s: float = 0.0


def link_to(trace: Trace, holder: str) -> Link:
    """The trace's link to a holder.

    Raises:
        ConfigError: If it has none.
    """
    for link in trace.links:
        if link.to == holder:
            return link
    known = ", ".join(link.to for link in trace.links) or "none"
    raise ConfigError(
        f"The trace has no link to {holder!r}; its links: {known}.",
        "Give it one: trace.with_machine(links=[...]), measured by `measure_links`.",
    )


def codec_cost(trace: Trace, name: str) -> CodecCost:
    """Cost of a codec on the trace's machine.

    Raises:
        ConfigError: If the trace has no cost of this codec.
    """
    for cost in trace.codecs:
        if cost.name == name:
            return cost
    known = ", ".join(cost.name for cost in trace.codecs) or "none"
    raise ConfigError(
        f"The trace knows no cost of codec {name!r}; it knows: {known}.",
        "Give it one: trace.with_machine(codecs=[...]), measured by `measure_codecs`.",
    )


def packed_bytes(facts: Facts, costs: list[CodecCost]) -> int:
    """Bytes of a value after codecs; at most its own where a codec may leave it unchanged."""
    n, bits, side_bytes = float(facts.n_elements), 8.0 * facts.item_bytes, 0
    for cost in costs:
        side_bytes += ceil(n * cost.side_bits / 8)
        if cost.drops_zeros:
            n *= min((1 - facts.zeros) * MORE_ELEMENTS, 1.0)
        bits = min(cost.payload_bits or bits, bits)
    return min(ceil(n * bits / 8) + side_bytes, facts.n_elements * facts.item_bytes)


def away_bytes(trace: Trace, value: int, codecs: tuple[str, ...]) -> int:
    """Bytes that a value takes where it waits."""
    return packed_bytes(facts_of(trace)[value], _fitting(trace, value, codecs))


def _fitting(trace: Trace, value: int, codecs: tuple[str, ...]) -> list[CodecCost]:
    """Costs of codecs, after a check that the value meets their needs."""
    costs = [codec_cost(trace, name) for name in codecs]
    kinds = facts_of(trace)[value].kinds
    for cost in costs:
        if cost.needs not in kinds:
            found = f"value {value} of {trace.module_of(value)} is {', '.join(sorted(kinds)) or 'nothing of use'}"
            raise ConfigError(
                f"Codec {cost.name!r} needs {cost.needs!r}; {found}.", "Choose codecs by facts_of(trace)[value].kinds."
            )
    return costs


def temporary_growth(facts: Facts) -> float:
    """Factor on the measured share of temporaries that a value may take: 2 for halves.

    Flags are as many bytes an element. Lossy codecs and zvc, which compute in float32, may take more than that.
    """
    return _MEASURED_ITEM_BYTES / facts.item_bytes if 1 < facts.item_bytes < _MEASURED_ITEM_BYTES else 1.0


def away_effect(trace: Trace, value: int, action: Away, needed: int | None, until: int) -> AwayEffect:
    """Effect of one value that is put away.

    Args:
        trace: The recorded step.
        value: Its id.
        action: Its action.
        needed: First tick at which it is read after the program itself has let go of it; None where it never is.
        until: Last tick at which anybody may read it.

    Returns:
        The effect; ticks that the action leaves open are taken as late as possible on the way out and back.
    """
    made, dense = trace.ops[trace.values[value].op].tick, trace.value_bytes(value)
    costs = _fitting(trace, value, action.codecs)
    facts = facts_of(trace)[value]
    encode_s = sum(cost.encode_seconds(dense, facts.zeros) for cost in costs)
    decode_s = sum(cost.decode_seconds(dense, facts.zeros) for cost in costs) if needed is not None else 0.0
    packed = packed_bytes(facts, costs)
    last = until if needed is None else needed
    found: list[Interval] = []
    out = made
    if isinstance(action, Offload):
        busy_s = link_to(trace, action.to).busy_s_per_byte * packed
        encode_s, decode_s = encode_s + busy_s, decode_s + busy_s * (needed is not None)
        out = max(action.out_at, made)
        gone = max(action.gone_by if action.gone_by >= 0 else trace.ops[trace.forward_ops[-1]].tick, out)
        back = last if action.back_at < 0 else min(action.back_at, last)
        if costs:
            found.append((out, gone, packed))
        if needed is not None:
            found.append((max(back, gone + 1), needed if costs else until, packed))
    else:
        gone = -1
        found.append((made, last, packed))
    if costs:
        as_measured = dense * temporary_growth(facts)
        found.append((out, out, max(cost.encode_temporaries(as_measured) for cost in costs)))
        if needed is not None:
            found.append((needed, needed, max(cost.decode_temporaries(as_measured) for cost in costs)))
            found.append((needed, until, dense))
        gone = out if isinstance(action, Offload) else gone
    return AwayEffect(gone, needed, tuple(i for i in found if i[1] >= i[0]), encode_s + decode_s, decode_s)
