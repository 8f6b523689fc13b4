"""The largest batch that a budget allows, with and without a plan: from fake traces, so nothing is run or allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, TypeVar

from torch import Tensor, nn

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.progress_bar import track
from ctdr_lightning.basics.units import as_given, parse_bytes
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.policies.registry import Choose, Policy, policy_of
from ctdr_lightning.memory.recorder.fake import record_fake
from ctdr_lightning.memory.simulator.prepared import Prepared

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The answer.

    Attributes:
        size: The largest batch whose plan fits.
        plan: That plan.
        plain_size: The largest batch that fits without a plan; 0 where not even one sample does.
    """

    size: int
    plan: Plan
    plain_size: int


def max_batch(
    module: M,
    make_inputs: Callable[[int], Any],
    step: Callable[[M, Any], Tensor],
    budget: int | str,
    policy: str | Policy | Choose = "auto",
    *,
    static_bytes: int = 0,
    most: int = 1 << 20,
    device: DeviceModel | str | None = None,
    progress: bool = True,
) -> LargestBatch:
    """Find the largest batch by bisection.

    Args:
        module: The model; it is copied, never touched.
        make_inputs: From a batch size to what ``step`` needs; only shapes and dtypes matter, so that ``torch.empty``
            or tensors on the meta device will do.
        step: From the model and the inputs to a scalar loss.
        budget: Bytes that the step's true peak may reach, weights and gradients included.
        policy: Name of a registered policy, or a callable.
        static_bytes: Memory besides the step's that is there all along: optimizer state.
        most: Where to stop looking.
        device: Device whose speed the plan is made for; None is this processor.
        progress: Whether to show on stderr how far the search is, once it has lasted two seconds.

    Raises:
        InfeasibleBudgetError: When not even one sample fits.

    Example:
        >>> net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
        >>> from torch import empty
        >>> found = max_batch(net, lambda size: empty(size, 64), lambda net, x: net(x).sum(), "500KB")
        >>> found.size > found.plain_size
        True
    """
    limit = parse_bytes(budget)
    chosen = POLICIES[policy] if isinstance(policy, str) else policy_of(policy)

    tries = track(count(), "max_batch", total=3 * most.bit_length(), enabled=progress)

    @cache  # what a search found of a step is remembered with it
    def traced(size: int) -> Prepared:
        next(tries)
        return Prepared(record_fake(module, make_inputs(size), step, device=device).with_static(static_bytes))

    def fits_plainly(size: int) -> bool:
        return traced(size).plain_peak_bytes <= limit

    def may_fit(size: int) -> bool:
        return floor_bytes(traced(size)) <= limit

    def fits(size: int) -> bool:
        try:
            return chosen(traced(size), Budget(peak_bytes=limit)).peak_bytes <= limit
        except InfeasibleBudgetError:
            return False

    with closing(tries):
        plain_size = largest(fits_plainly, 0, most)
        size = largest(fits, plain_size, largest(may_fit, plain_size, most))
        if size == 0:
            raise _not_even_one(traced(1), limit, policy, as_given(budget, limit))
        return LargestBatch(size, plan(traced(size), limit, policy), plain_size)


def _not_even_one(
    sample: Prepared, limit_bytes: int, policy: str | Policy | Choose, asked: str
) -> InfeasibleBudgetError:
    """The planner's own error for one sample, which names the budget that it takes."""
    problem = f"Not even one sample fits the budget of {asked}"
    try:
        plan(sample, limit_bytes, policy)
    except InfeasibleBudgetError as error:
        return InfeasibleBudgetError(f"{problem}. {error.problem}", error.hint, least_peak_bytes=error.least_peak_bytes)
    raise AssertionError("unreachable")


def largest(holds: Callable[[int], bool], known: int, most: int) -> int:
    """The largest number up to ``most`` for which something holds that holds for all smaller ones.

    Args:
        holds: Asked O(log) times.
        known: A number for which it holds already.
        most: Where to stop looking.
    """
    low, step = known, max(known, 1)
    while low < most and holds(min(low + step, most)):
        low, step = min(low + step, most), 2 * step
    high = min(low + step, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
