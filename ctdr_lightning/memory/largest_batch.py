"""The largest batch that a budget allows, with and without a plan: from fake traces, so nothing is run or allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any, TypeVar

from torch import Tensor, nn

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.progress_bar import track
from ctdr_lightning.basics.units import as_given, format_bytes, parse_bytes
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.allocator.reserved import expandable_segments, runs_within
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import kept_peak_bytes, left_out
from ctdr_lightning.memory.planner import plan, served
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.policies.registry import Choose, Policy, policy_of
from ctdr_lightning.memory.recorder.fake import record_fake
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.traces.optimizer import NO_OPTIMIZER, OptimizerBytes

M = TypeVar("M", bound=nn.Module)
_ALL_OUTPUTS = LeanStep()


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
    optimizer: OptimizerBytes = NO_OPTIMIZER,
    most: int = 1 << 20,
    device: DeviceModel | str | None = None,
    precision: str | None = None,
    rounding: bool = True,
    progress: bool = True,
) -> LargestBatch:
    """Find the largest batch by bisection.

    Args:
        module: The model; it is copied, never touched.
        make_inputs: From a batch size to the inputs of ``step``; only shapes and dtypes matter, so that ``torch.empty``
            or tensors on the meta device suffice.
        step: From the model and the inputs to a scalar loss.
        budget: Bytes that the step's true peak may reach, weights and gradients included. On a GPU CUDA's allocator
            must serve the step within them, fragmentation included, without giving segments back in every step.
        policy: Name of a registered policy, or a callable.
        static_bytes: Bytes outside of the step that are resident throughout, such as optimizer state.
        optimizer: The bytes of an optimizer's state and step, as `predict` gives them.
        most: Largest batch to try.
        device: Device that the step is for, as for `record_fake`; None is this processor.
        precision: Precision of the step, as for `record_fake`.
        rounding: Whether large linear layers may leave out their outputs, with the same loss up to rounding, in batches
            that do not fit without a plan.
        progress: Whether to show on stderr how far the search is, once it has lasted two seconds.

    Raises:
        InfeasibleBudgetError: If not even one sample fits.

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

    @cache
    def account(size: int, lean_step: LeanStep = _ALL_OUTPUTS) -> BatchAccount:
        next(tries)
        trace = record_fake(module, make_inputs(size), lean_step.step(step), device=device, precision=precision)
        return BatchAccount(trace.with_static(static_bytes), optimizer)

    @cache  # the result of a search is remembered with its step
    def traced(size: int) -> Prepared:
        lean = left_out(module, partial(account, size), limit, account(size)) if rounding else None
        return Prepared((lean.account if lean is not None else account(size)).whole)

    def fits_plainly(size: int) -> bool:
        return _fits_plainly(account(size), limit)

    def may_fit(size: int) -> bool:
        return floor_bytes(traced(size)) <= limit

    def fits(size: int) -> bool:
        return _fitting(traced(size), limit, chosen) is not None

    with closing(tries):
        plain_size = largest(fits_plainly, 0, most)
        size = largest(fits, plain_size, largest(may_fit, plain_size, most))
        if size == 0:
            raise _not_even_one(traced(1), limit, policy, as_given(budget, limit))
        return LargestBatch(size, plan(traced(size), limit, policy), plain_size)


def _fits_plainly(account: BatchAccount, limit_bytes: int) -> bool:
    if account.step.device != "cuda" or kept_peak_bytes(account) > limit_bytes:
        return kept_peak_bytes(account) <= limit_bytes
    return runs_within(account.whole, None, limit_bytes, expandable=expandable_segments())


def _fitting(step: Prepared, limit_bytes: int, policy: Policy) -> Plan | None:
    """A plan that fits; None where the policy has none. On a GPU the allocator holds it, too."""
    limits = Budget(peak_bytes=limit_bytes)
    try:
        timeline = policy(step, limits)
    except InfeasibleBudgetError:
        return None
    if timeline.peak_bytes > limit_bytes:
        return None
    made = Plan(policy.name, timeline, limit_bytes, options=policy.option_values)
    return served(step, made, limits, policy, steadily=True) if step.trace.device == "cuda" else made


def _not_even_one(
    sample: Prepared, limit_bytes: int, policy: str | Policy | Choose, asked: str
) -> InfeasibleBudgetError:
    """The planner's own error for one sample, which names the budget that it takes."""
    problem = f"Not even one sample fits the budget of {asked}"
    try:
        made = plan(sample, limit_bytes, policy)
    except InfeasibleBudgetError as error:
        return InfeasibleBudgetError(f"{problem}. {error.problem}", error.hint, least_peak_bytes=error.least_peak_bytes)
    reserved = made.reserved.expandable_bytes if expandable_segments() else made.reserved.reserved_bytes
    return InfeasibleBudgetError(
        f"{problem}: its tensors take {format_bytes(made.peak_bytes)}, for which CUDA's allocator reserves "
        f"{format_bytes(reserved)}",
        f"Write a budget of {format_bytes(reserved)}, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        least_peak_bytes=reserved,
    )


def largest(holds: Callable[[int], bool], known: int, most: int) -> int:
    """The largest number up to ``most`` for which something holds that holds for all smaller ones.

    Args:
        holds: Asked O(log) times.
        known: A number for which it holds already.
        most: Largest batch to try.
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
