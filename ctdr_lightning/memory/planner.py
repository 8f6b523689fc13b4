"""From a trace and a budget to a plan: the policy chooses, the simulator judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ctdr_lightning.basics.devices import memory_bytes_here
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import as_given, parse_bytes
from ctdr_lightning.memory.allocator.reserved import expandable_segments, runs_within
from ctdr_lightning.memory.bounds.lower_bound import lower_bound_seconds
from ctdr_lightning.memory.plans.actions import Actions
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.search.infeasible import infeasible
from ctdr_lightning.memory.simulator.schedule import scheduled
from ctdr_lightning.memory.simulator.simulator import simulate
from ctdr_lightning.memory.traces.trace import Trace

# Six torchvision nets at 0.7, 0.5 and 0.4 of their peak: of 16 plans nine ran with 3 % less for the tensors, three with
# 6 %, three with 9 to 17 %, one not at all. Steps by the share of fragmentation took up to four times what was needed:
# the allocator gives free segments back before it fails.
TIGHTER, STEPS = 0.97, 7


def plan(
    trace: Trace,
    budget: int | float | str | Budget | None = None,
    policy: str | Callable[[Trace, Budget], Actions] = "auto",
) -> Plan:
    """Make a plan for a step.

    Args:
        trace: The recorded step; ``trace.with_static`` tells it of memory that it did not touch, such as an optimizer's
            state.
        budget: Largest true peak of the step: bytes, a string such as ``"8GiB"``, or a fraction of the device's memory;
            None leaves the peak to the policy. A :class:`Budget` may limit the seconds instead.
        policy: Name of a registered policy, or a callable from a trace and a budget to actions.

    Returns:
        The plan, with its predicted peak and seconds.

    Raises:
        ConfigError: When the budget or the policy's name cannot be read.
        InfeasibleBudgetError: When the policy's best plan does not fit; it names the least peak, what sets it, and the
            nearest remedy.
    """
    limits = resolve_budget(budget, trace.device)
    chosen = (POLICIES[policy] if isinstance(policy, str) else policy) if trace.ops else _nothing
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "custom")
    try:
        made = make_plan(trace, chosen(trace, limits), name, limits)
    except InfeasibleBudgetError as error:
        if limits.peak_bytes is None:
            raise
        raise _infeasible(trace, limits, name, error.least_peak_bytes, budget) from error
    if limits.peak_bytes is not None and made.peak_bytes > limits.peak_bytes:
        raise _infeasible(trace, limits, name, made.peak_bytes, budget)
    if limits.peak_bytes is not None and trace.device == "cuda":
        made = _served(made, limits, chosen)
    limit = limits.peak_bytes if limits.peak_bytes is not None else made.peak_bytes
    # The bound is on recomputation. A plan that puts values away can be faster; only the plain step bounds that.
    bound_s = trace.seconds if made.away else lower_bound_seconds(trace, limit)
    return replace(made, bound_seconds=bound_s)


def _served(made: Plan, limits: Budget, chosen: Callable[[Trace, Budget], Actions]) -> Plan:
    """A plan that CUDA's allocator can serve within the budget, fragmentation included; as it is where none is found.

    The tensors get less, step by step, until the allocator gets along with the budget.
    """
    assert limits.peak_bytes is not None
    found, room = made, limits.peak_bytes
    for _ in range(STEPS):
        if runs_within(found.trace, found.actions, limits.peak_bytes, expandable=expandable_segments()):
            return replace(found, budget_bytes=limits.peak_bytes)
        room = int(TIGHTER * room)
        try:
            found = make_plan(made.trace, chosen(made.trace, replace(limits, peak_bytes=room)), made.policy, limits)
        except InfeasibleBudgetError:
            break
    return made


def _infeasible(trace: Trace, limits: Budget, policy: str, least_bytes: int, asked: Any) -> InfeasibleBudgetError:
    """The error, with the plan of the default policy, which looks at every other's, to compare with."""
    assert limits.peak_bytes is not None
    best = make_plan(trace, (POLICIES["auto"] if trace.ops else _nothing)(trace, limits), "auto", limits)
    words = "" if isinstance(asked, Budget) else as_given(asked, limits.peak_bytes)
    return infeasible(trace, best, limits.peak_bytes, policy, least_bytes, words)


def _nothing(trace: Trace, budget: Budget) -> Actions:
    """The plan of a step without any op, such as one that returns no loss: no policy has to know of it."""
    return {}


def resolve_budget(budget: int | float | str | Budget | None, device: str) -> Budget:
    """Read a budget for a step on a type of device."""
    if isinstance(budget, Budget):
        return budget
    if budget is None:
        return Budget()
    return Budget(peak_bytes=parse_bytes(budget, total_bytes=memory_bytes_here(device)))


def make_plan(trace: Trace, actions: Actions, policy: str, budget: Budget | None = None) -> Plan:
    """Write actions down as a plan, with what the simulator predicts of them."""
    limit = budget.peak_bytes if budget is not None else None
    return Plan(policy, simulate(trace, scheduled(trace, actions)), limit)
