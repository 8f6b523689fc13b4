"""From a trace and a budget to a plan: the policy chooses, the simulator judges."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from ctdr_lightning.basics.devices import memory_bytes_here
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import as_given, parse_bytes
from ctdr_lightning.memory.allocator.reserved import expandable_segments, flushes_within
from ctdr_lightning.memory.bounds.lower_bound import sharp_bound_seconds
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.plans.quiet_forward import quieter
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.policies.registry import Choose, Policy, policy_of
from ctdr_lightning.memory.search.infeasible import infeasible
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.traces.trace import Trace

# Six torchvision nets at 0.7, 0.5 and 0.4 of their peak: of 16 plans nine ran with 3 % less for the tensors, three with
# 6 %, three with 9 to 17 %, one not at all. Steps by the share of fragmentation took up to four times the necessary:
# the allocator gives free segments back before it fails.
TIGHTER, STEPS = 0.97, 7


def plan(
    step: Trace | Prepared,
    budget: int | float | str | Budget | None = None,
    policy: str | Policy | Choose = "auto",
) -> Plan:
    """Make a plan for a step.

    Args:
        step: The recorded step; ``trace.with_static`` tells it of memory that it did not touch, such as an optimizer's
            state. ``Prepared(trace)`` if several plans are made of one step: their shared facts are then made once.
        budget: Largest true peak of the step: bytes, a string such as ``"8GiB"``, or a fraction of the device's memory;
            None leaves the peak to the policy. A :class:`Budget` may limit the seconds instead.
        policy: Name of a registered policy, one with other options (``POLICIES["rotor"].with_options(n_slots=250)``),
            or a callable from a prepared step and a budget to actions.

    Returns:
        The plan, with its predicted peak and seconds.

    Raises:
        ConfigError: If the budget or the policy's name cannot be read, or allows less time than the plain step takes.
        InfeasibleBudgetError: If the policy's best plan does not fit; it names the least peak, its cause, and the
            nearest remedy.
    """
    step = prepared(step)
    limits = resolve_budget(budget, step.trace.device)
    chosen = POLICIES[policy] if isinstance(policy, str) else policy_of(policy)
    try:
        made = _chosen(step, limits, chosen)
    except InfeasibleBudgetError as error:
        if limits.peak_bytes is None:
            raise
        raise _infeasible(step, limits, chosen, error.least_peak_bytes, budget) from error
    if limits.peak_bytes is not None and made.peak_bytes > limits.peak_bytes:
        raise _infeasible(step, limits, chosen, made.peak_bytes, budget, made)
    if limits.peak_bytes is not None and step.trace.device == "cuda":
        made = served(step, made, limits, chosen) or made
        if chosen.name == "auto":
            # in the bytes of the plan that is served: more would not be
            choose = partial(chosen, budget=replace(limits, peak_bytes=made.peak_bytes))
            made = quieter(step, made, choose, partial(_flushes, limits=limits))
    limit = limits.peak_bytes if limits.peak_bytes is not None else made.peak_bytes
    # The bound is on recomputation. A plan that puts values away can be faster; only the plain step bounds that.
    bound_s = step.trace.seconds if made.away else sharp_bound_seconds(step, limit)
    return replace(made, bound_seconds=bound_s)


def _chosen(step: Prepared, limits: Budget, policy: Policy) -> Plan:
    """A policy's plan, whether it fits or not. A step without any op concerns no policy."""
    timeline = policy(step, limits) if step.trace.ops else judge(step, {})
    return Plan(policy.name, timeline, limits.peak_bytes, options=policy.option_values)


def served(step: Prepared, made: Plan, limits: Budget, policy: Policy) -> Plan | None:
    """A plan that CUDA's allocator can serve within the budget, fragmentation included.

    The tensors get less, step by step, until the allocator gets along with the budget without giving segments back in
    every step.

    Args:
        step: The recorded step.
        made: The policy's plan, whose tensors fit.
        limits: With a limit on the peak.
        policy: Which made it.

    Returns:
        The first plan found without, or else the first that runs at all; None if there is none.
    """
    assert limits.peak_bytes is not None
    found, room, second = made, limits.peak_bytes, None
    for _ in range(STEPS):
        flushes = _flushes(found, limits)
        if flushes == 0:
            return replace(found, budget_bytes=limits.peak_bytes)
        if flushes < inf:
            second = second or replace(found, budget_bytes=limits.peak_bytes)
        room = int(TIGHTER * room)
        try:
            found = _chosen(step, replace(limits, peak_bytes=room), policy)
        except InfeasibleBudgetError:
            break
    return second


def _flushes(made: Plan, limits: Budget) -> float:
    """Times that CUDA's allocator gives its segments back in a step; infinite where that does not help."""
    assert limits.peak_bytes is not None
    found = flushes_within(made.trace, made.actions, limits.peak_bytes, expandable=expandable_segments())
    return inf if found is None else found


def _infeasible(
    step: Prepared, limits: Budget, policy: Policy, least_bytes: int, asked: Any, made: Plan | None = None
) -> InfeasibleBudgetError:
    """The error, with the plan of the default policy, which looks at every other's, to compare with."""
    assert limits.peak_bytes is not None
    auto = POLICIES["auto"]
    # Several policies may fail at one budget of one step: the plan they are compared with is made once.
    best = step.once(
        ("closest", limits), lambda: made if made is not None and policy is auto else _chosen(step, limits, auto)
    )
    words = "" if isinstance(asked, Budget) else as_given(asked, limits.peak_bytes)
    return infeasible(best, limits.peak_bytes, policy.name, least_bytes, words)


def resolve_budget(budget: int | float | str | Budget | None, device: str) -> Budget:
    """Read a budget for a step on a type of device."""
    if isinstance(budget, Budget):
        return budget
    if budget is None:
        return Budget()
    return Budget(peak_bytes=parse_bytes(budget, total_bytes=memory_bytes_here(device)))
