"""Which place or codec that was not asked for would let a step fit its budget: tried by planning with it."""

from __future__ import annotations

from dataclasses import replace

from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.memory.account.advice import MEMORY, Change
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.bounds.lower_bound import held_by_the_program
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.policies import POLICIES
from ctdr_lightning.memory.simulator.actions import Compress, Offload

# A proposal has to fit again in another run, whose ops, links and codecs are timed anew: 3 % to spare.
_FILLED = 0.97


def place_that_fits(
    account: BatchAccount, limit_bytes: int, given: Places, policy: str = "auto", device_name: str | None = None
) -> Change | None:
    """The place or codec that helps; exact codecs before a place, which takes longer.

    Args:
        account: The batch, with the links and codecs that are used already.
        limit_bytes: Largest peak.
        given: The places and codecs that are used already.
        policy: Name of the policy that plans.
        device_name: A device of the table; None measures this machine.

    Returns:
        None where neither helps, or the policy does not use it.
    """
    asked = given.codecs and not given.by_default
    codecs, place = Places.read(None, None, "exact").codecs, "host" if account.step.device == "cuda" else "disk"
    more = {
        ("codecs", "exact"): (Compress, replace(given, codecs=codecs, by_default=False), asked),
        ("offload", place): (Offload, replace(given, offload=(place,)), given.offload),
    }
    for (argument, value), (kind, places, already) in more.items():
        if not already and kind in POLICIES[policy].uses:
            found = plan_with(places, account, limit_bytes, policy, device_name)
            if found is not None:
                equipped, made = found
                return Change(MEMORY, argument, value, equipped, equipped.peak_bytes(made))
    return None


def plan_with(
    places: Places, account: BatchAccount, limit_bytes: int, policy: str = "auto", device_name: str | None = None
) -> tuple[BatchAccount, Plan] | None:
    """The account of a batch with places or codecs, and a plan that fits with 3 % to spare; None where there is none.

    Args:
        places: The places and codecs.
        account: The batch.
        limit_bytes: Largest peak.
        policy: Name of the policy that plans.
        device_name: A device of the table; None measures this machine.
    """
    if max(held_by_the_program(account.standing), account.rest_bytes) > limit_bytes:
        return None
    try:
        equipped = replace(account, step=places.equip(account.step, device_name))
        return equipped, plan(equipped.standing, int(_FILLED * limit_bytes), policy)
    except CTDRError:  # no plan fits, or the place cannot be used
        return None
