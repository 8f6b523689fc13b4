"""Which place or codec that was not asked for would let a step fit its budget: tried by planning with it."""

from __future__ import annotations

from dataclasses import replace

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory.bounds.staged_program import lives_of
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.actions import Compress, Offload
from ctdr_lightning.memory.policies import POLICIES
from ctdr_lightning.memory.traces.trace import Trace

# What is named has to fit again in another run, whose ops, links and codecs are timed anew: 3 % to spare.
_FILLED = 0.97


def place_that_fits(
    trace: Trace, limit_bytes: int, given: Places, policy: str = "auto", device_name: str | None = None
) -> tuple[str, str, int] | None:
    """The argument that helps, its value and the peak with it; exact codecs before a place, which takes longer.

    Args:
        trace: The step, with the links and codecs that are used already.
        limit_bytes: Largest peak.
        given: The places and codecs that are used already.
        policy: Name of the policy that plans.
        device_name: A device of the table; None measures this machine.

    Returns:
        None where neither helps, or the policy does not use it.
    """
    if held_by_the_program(trace) > limit_bytes:
        return None
    asked = given.codecs and not given.by_default
    codecs, place = Places.read(None, None, "exact").codecs, "host" if trace.device == "cuda" else "disk"
    more = {
        ("codecs", "exact"): (Compress, replace(given, codecs=codecs, by_default=False), asked),
        ("offload", place): (Offload, replace(given, offload=(place,)), given.offload),
    }
    for (argument, value), (kind, places, already) in more.items():
        if not already and kind in POLICIES[policy].uses:
            peak_bytes = _peak_with(trace, limit_bytes, places, policy, device_name)
            if peak_bytes is not None:
                return argument, value, peak_bytes
    return None


def held_by_the_program(trace: Trace) -> int:
    """The peak if nothing that autograd saved took any memory: no place and no codec goes below."""
    bare = replace(trace, values=tuple(replace(value, saves=()) for value in trace.values))
    return int(lives_of(bare).bytes_at.max(initial=trace.resident_bytes))


def _peak_with(trace: Trace, limit_bytes: int, places: Places, policy: str, device_name: str | None) -> int | None:
    """The peak under a plan that uses some places; None where none fits, or a place cannot be used."""
    try:
        return plan(places.equip(trace, device_name), int(_FILLED * limit_bytes), policy).peak_bytes
    except CTDRError:
        return None
