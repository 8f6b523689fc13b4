"""From a trace and a budget to a plan: the policy chooses, the simulator judges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from ctdr_lightning.basics.allocator_settings import expandable_segments
from ctdr_lightning.basics.devices import memory_bytes_here
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import as_given, parse_bytes
from ctdr_lightning.memory.allocator.reserved import flushes_within
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds, sharp_bound_seconds
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.plans.quiet_forward import beginnings, quietest
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.policies.auto import Descent
from ctdr_lightning.memory.policies.registry import Choose, Policy, policy_of
from ctdr_lightning.memory.search.infeasible import infeasible
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.traces.trace import Trace

# Steps by which the tensors get less for the allocator: 1.5 % of the budget, then more each time, 19 % in all. With
# expandable segments ViT-B/16 and ResNet-50 at 60 % of their peak are served after two, at 40 % after three and four,
# GPT-2 medium at 60 % after five.
FIRST_STEP, GROWTH, STEPS = 0.015, 1.3, 7


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
        made = _made(step, limits, chosen)
    except InfeasibleBudgetError as error:
        if limits.peak_bytes is None:
            raise
        raise _infeasible(step, limits, chosen, error.least_peak_bytes, budget) from error
    if limits.peak_bytes is not None and made.peak_bytes > limits.peak_bytes:
        raise _infeasible(step, limits, chosen, made.peak_bytes, budget, made)
    limit = limits.peak_bytes if limits.peak_bytes is not None else made.peak_bytes
    # The bound is on recomputation. A plan that puts values away can be faster; only the plain step bounds that.
    bound_s = step.trace.seconds if made.away else sharp_bound_seconds(step, limit)
    return replace(made, bound_seconds=bound_s)


def _chosen(step: Prepared, limits: Budget, policy: Policy) -> Plan:
    """A policy's plan, whether it fits or not. A step without any op concerns no policy."""
    timeline = policy(step, limits) if step.trace.ops else judge(step, {})
    return Plan(policy.name, timeline, limits.peak_bytes, options=policy.option_values)


def _made(step: Prepared, limits: Budget, policy: Policy) -> Plan:
    """A policy's plan; on a GPU one that its allocator serves, and by the default policy one that spares its host."""
    limit = limits.peak_bytes
    if limit is None or step.trace.device != "cuda" or not step.trace.ops:
        return _chosen(step, limits, policy)
    spares_host = policy.name == "auto" and limits.seconds is None
    plans = _descending(step, limits) if spares_host else _tighter(step, limits, policy)
    return served(plans, limit)


def _rooms(limit_bytes: int) -> Iterator[int]:
    """A limit, and lower and lower ones for the tensors."""
    share, less = 1.0, FIRST_STEP
    for _ in range(STEPS):
        yield int(share * limit_bytes)
        share, less = share - less, less * GROWTH


def _tighter(step: Prepared, limits: Budget, policy: Policy) -> Iterator[Plan]:
    """A policy's plan, and its plans for less."""
    assert limits.peak_bytes is not None
    first, *lower = _rooms(limits.peak_bytes)
    yield _chosen(step, limits, policy)
    with suppress(InfeasibleBudgetError):
        for room in lower:
            made = _chosen(step, replace(limits, peak_bytes=room), policy)
            yield replace(made, budget_bytes=first)


def _descending(step: Prepared, limits: Budget) -> Iterator[Plan]:
    """The default policy's plan that the host can keep up with, and those for less that its search goes on to.

    Where that finds no more, values are dropped in more of the forward, in a search of a shorter time.
    """
    limit = limits.peak_bytes
    assert limit is not None
    parts, descent, n_searches = beginnings(step), None, 0
    for room in _rooms(limit):
        made = descent.below(room) if descent is not None else None
        while made is None and parts:
            part = quietest(step, parts, partial(lower_bound_seconds, peak_bytes=room))
            parts = {} if part is step else {other: wait_s for other, wait_s in parts.items() if other is not part}
            n_searches += 1
            limited = replace(limits, peak_bytes=room, time_limit_s=limits.time_limit_s / n_searches)
            descent = Descent(part, limited)
            made = descent.first if descent.first.peak_bytes <= room or not parts else None
        if made is None:
            return
        yield Plan("auto", judge(step, made.actions), limit)


def served(plans: Iterator[Plan], limit_bytes: int) -> Plan:
    """The first plan that CUDA's allocator can serve within the budget, fragmentation included.

    Args:
        plans: Plans whose tensors take less and less, until the allocator gets along with the budget without giving
            segments back in every step.
        limit_bytes: The budget.

    Returns:
        The first plan without, or else the fastest of those with the fewest times.
    """
    found = next(plans)
    fewest = _flushes(found, limit_bytes)
    while fewest and found.peak_bytes <= limit_bytes and (made := next(plans, None)) is not None:
        flushes = _flushes(made, limit_bytes)
        fits = made.peak_bytes <= limit_bytes
        if fits and (flushes, made.wall_seconds) < (fewest, found.wall_seconds):
            found, fewest = made, flushes
    return found


def _flushes(made: Plan, limit_bytes: int) -> float:
    if made.peak_bytes > limit_bytes:
        return inf
    found = flushes_within(made.trace, made.actions, limit_bytes, expandable=expandable_segments())
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
