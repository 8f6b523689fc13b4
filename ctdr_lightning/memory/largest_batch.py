"""The largest batch that a budget allows, with and without a plan: from fake traces, so nothing is run or allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, takewhile
from math import inf
from typing import Any, TypeVar

from torch import Tensor, nn

from ctdr_lightning.basics.allocator_settings import expandable_segments
from ctdr_lightning.basics.checks import real
from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.progress_bar import track
from ctdr_lightning.basics.torch_private import tree_map_only
from ctdr_lightning.basics.units import as_given, format_bytes, parse_bytes
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.allocator.reserved import is_served
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.lean.outputs import kept_peak_bytes, left_out
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.policies.registry import Choose, Policy, policy_of
from ctdr_lightning.memory.recorder.fake import record_fake
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.foreseen import foreseen
from ctdr_lightning.memory.traces.optimizer import NO_OPTIMIZER, OptimizerBytes

M = TypeVar("M", bound=nn.Module)
Account = Callable[..., BatchAccount]
_ALL_OUTPUTS = LeanStep()
# Batches are found to this share: ResNet-50 in 16 GiB of an A100 takes 3 searches for 825, where bisection took 57 for
# 643; each search takes 5 s.
SHARE = 0.02
# A plan that fills the budget with tensors is not served; one of so much less fits a larger batch. ResNet-50 in 23 GiB:
# 1,156 samples without, 1,380 with 0.85, 1,403 with 0.78, which takes one search more. U-Net in 11 GiB: 72, 91, 97.
TIGHT_ROOM = 0.85


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
    max_slowdown: float | None = None,
    progress: bool = True,
) -> LargestBatch:
    """Find the largest batch.

    Args:
        module: The model; it is copied, never touched.
        make_inputs: From a batch size to the inputs of ``step``; only shapes and dtypes matter, so that ``torch.empty``
            or tensors on the meta device suffice.
        step: From the model and the inputs to a scalar loss. Values that it reads are assumed, as for `record_fake`.
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
        max_slowdown: Longest step, in steps of the same batch without a plan; None allows any. Near the least peak
            that a batch has at all, plans may take many times as long.
        progress: Whether to show on stderr how far the search is, once it has lasted two seconds.

    Raises:
        InfeasibleBudgetError: If not even one sample fits.
        ConfigError: If ``max_slowdown`` is below 1.

    Example:
        >>> net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())])
        >>> from torch import empty
        >>> found = max_batch(net, lambda size: empty(size, 64), lambda net, x: net(x).sum(), "500KB")
        >>> found.size > found.plain_size
        True
    """
    limit, most_time = parse_bytes(budget), inf if max_slowdown is None else max_slowdown
    if max_slowdown is not None:
        real("max_slowdown", max_slowdown, least=1.0)
    chosen = POLICIES[policy] if isinstance(policy, str) else policy_of(policy)
    tries = track(count(), "max_batch: batches tried", enabled=progress)

    def recorded(size: int, lean_step: LeanStep) -> BatchAccount:
        next(tries)
        inputs = tree_map_only(Tensor, _without_contents, make_inputs(size))
        recorded = partial(record_fake, device=device, precision=precision, reads_values=True)
        trace = recorded(module, inputs, lean_step.step(step))
        return BatchAccount(trace.with_static(static_bytes), optimizer)

    def plainly(account: Account) -> int:
        return largest(lambda size: _fits_plainly(account(size), limit), 0, most, near, SHARE)

    with closing(tries):
        steps = _Steps(recorded)
        near = _extrapolated(lambda size: kept_peak_bytes(steps.recorded(size)), min(2, most), limit, most)
        plain_size = plainly(steps.foreseen)
        if plain_size and not _fits_plainly(steps.recorded(plain_size), limit):
            plain_size = plainly(steps.recorded)
        larger = min(2 * plain_size + 2, most)
        lean = _lean_step(module, partial(steps.recorded, larger), limit) if rounding else _ALL_OUTPUTS

        def prepared(account: Account) -> Callable[[int], Prepared]:  # the result of a search is remembered with it
            return cache(lambda size: Prepared(account(size, lean if size > plain_size else _ALL_OUTPUTS).whole))

        search = _Search(prepared(steps.foreseen), prepared(steps.recorded), limit, chosen, most, most_time)
        found = search.largest(plain_size)
        if found is None:
            raise _not_even_one(search.recorded(1), limit, policy, as_given(budget, limit), most_time)
        return LargestBatch(*found, plain_size)


def _without_contents(tensor: Tensor) -> Tensor:
    """Inputs may have been made by ``torch.empty``."""
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


class _Steps:
    """The steps of all batches: some are recorded, and the others are foreseen from these.

    Args:
        record: From a batch, and the layers whose outputs it leaves out, to its account.
    """

    def __init__(self, record: Account) -> None:
        self._record = record
        self._recorded: dict[tuple[LeanStep, int], BatchAccount] = {}

    def recorded(self, size: int, lean: LeanStep = _ALL_OUTPUTS) -> BatchAccount:
        """A step that was recorded."""
        if (lean, size) not in self._recorded:
            self._recorded[lean, size] = self._record(size, lean)
        return self._recorded[lean, size]

    def foreseen(self, size: int, lean: LeanStep = _ALL_OUTPUTS) -> BatchAccount:
        """A step without a recording, where two of the same ops or more are known."""
        known = [((n,), account.step) for (of, n), account in self._recorded.items() if of is lean]
        if len(known) < 2 or (lean, size) in self._recorded:
            return self.recorded(size, lean)
        step = foreseen(known, (size,))
        return self.recorded(size, lean) if step is None else replace(self._recorded[lean, known[0][0][0]], step=step)


def _lean_step(module: nn.Module, account: Callable[..., BatchAccount], limit_bytes: int) -> LeanStep:
    """The step of batches that need a plan, decided at one of them: its layers are those of all."""
    found = left_out(module, account, limit_bytes, account())
    return _ALL_OUTPUTS if found is None else LeanStep(found.names)


def _fits_plainly(account: BatchAccount, limit_bytes: int) -> bool:
    return kept_peak_bytes(account) <= limit_bytes and is_served(account.whole, None, limit_bytes)


def _extrapolated(n_bytes: Callable[[int], int], size: int, limit_bytes: int, most: int) -> int:
    """About the largest batch within a limit, by the line through the bytes of a batch and of one of eight times it."""
    larger = min(8 * size, most)
    first, second = n_bytes(size), n_bytes(larger)
    return min(most, max(1, size + (limit_bytes - first) * (larger - size) // max(1, second - first)))


class _Search:
    """The search for the largest batch that a policy finds a plan for.

    A plan of one batch is one of each smaller batch, whose step has the same values. So the search for a plan of a
    batch that is too large is not lost: it comes near the least peak, and a batch somewhat smaller fits by it. The
    search is over once a plan reaches less than `SHARE` further than those before.

    Args:
        foreseen: From a batch to its step, perhaps without a recording.
        recorded: From a batch to its step.
        limit_bytes: The budget.
        policy: The policy that plans.
        most: Largest batch to try.
        most_time: Longest step of a plan, in plain steps.
    """

    def __init__(
        self,
        foreseen: Callable[[int], Prepared],
        recorded: Callable[[int], Prepared],
        limit_bytes: int,
        policy: Policy,
        most: int,
        most_time: float,
    ) -> None:
        self._traced, self.recorded = foreseen, recorded
        self._limit_bytes, self._policy, self._most, self._most_time = limit_bytes, policy, most, most_time
        self._made: list[Timeline] = []

    def largest(self, known: int) -> tuple[int, Plan] | None:
        """The largest batch with its plan; None where not even one sample has one.

        Args:
            known: The largest batch that fits without a plan.
        """
        low, high, close = known, self._most + 1, 1
        size = _extrapolated(self._floor_bytes, min(max(2, low + 1), self._most), self._limit_bytes, self._most)
        while high - low > close:
            size = min(max(size, low + 1), high - 1)
            timeline = self._planned(self._traced(size), self._limit_bytes)
            before, low = low, low if timeline is None else self._reached(timeline, size, low)
            if timeline is not None and timeline.trace.device == "cuda" and low < size:
                low = self._with_room(size, low) if timeline.peak_bytes <= self._limit_bytes else low
            close = max(1, int(SHARE * low))
            if timeline is not None and known < low < size and low - before < close and not self._is_slow(timeline):
                break
            high = high if low == size else size
            size = 2 * size if high > self._most else (low + high) // 2
        if not low:
            return None
        made = self._fastest(self.recorded(low))
        if made is None and self._traced is not self.recorded:
            again = (self._limit_bytes, self._policy, self._most, self._most_time)
            return _Search(self.recorded, self.recorded, *again).largest(known)
        return None if made is None else (low, made)

    def _floor_bytes(self, size: int) -> int:
        return floor_bytes(self._traced(size))

    def _reached(self, timeline: Timeline, size: int, known: int) -> int:
        """The largest batch that fits by the plan of this one; at least the known one."""

        def carried(smaller: int) -> Timeline:
            return _carried(timeline, self._traced(smaller))

        self._made.append(timeline)
        near = size * self._limit_bytes // max(timeline.peak_bytes, self._limit_bytes)
        return largest(lambda smaller: self._holds(carried(smaller)), known, size, near, SHARE)

    def _with_room(self, size: int, known: int) -> int:
        """The largest batch by a plan with room for the allocator's pieces, where tensors alone would fit."""
        timeline = self._planned(self._traced(size), int(TIGHT_ROOM * self._limit_bytes))
        return known if timeline is None else self._reached(timeline, size, known)

    def _planned(self, step: Prepared, limit_bytes: int) -> Timeline | None:
        """The policy's plan, whether it fits or not; None where it has none."""
        with suppress(InfeasibleBudgetError):
            return self._policy(step, Budget(peak_bytes=limit_bytes)) if step.trace.ops else judge(step, {})
        return None

    def _holds(self, timeline: Timeline) -> bool:
        """Whether the budget holds a plan's tensors, and on a GPU CUDA's allocator serves them within it, in time."""
        if self._is_slow(timeline) or timeline.peak_bytes > self._limit_bytes:
            return False
        return is_served(timeline.trace, timeline.actions, self._limit_bytes)

    def _is_slow(self, timeline: Timeline) -> bool:
        """Whether a plan takes too long; one of a smaller batch, which has to free less, may not."""
        return timeline.seconds > self._most_time * timeline.trace.seconds

    def _fastest(self, step: Prepared) -> Plan | None:
        """The fastest plan for a batch: one of those found for others, or of a search for it; None where none holds."""
        carried = [judge(step, {}), *(_carried(made, step) for made in self._made)]
        held = [timeline for timeline in carried if self._holds(timeline)]
        if not held:
            return None
        made = min(held, key=lambda timeline: timeline.seconds)
        # A GPU's allocator served no faster plan for the largest batch of ResNet-50 and GPT-2 on three cards: 0 of 14.
        found = self._planned(step, self._limit_bytes) if made.replays and step.trace.device != "cuda" else None
        if found is not None and found.seconds < made.seconds and self._holds(found):
            made = found
        return Plan(self._policy.name, made, self._limit_bytes, options=self._policy.option_values)


def _carried(made: Timeline, step: Prepared) -> Timeline:
    """The actions of a timeline for the same step of another batch.

    A loop over parts of a batch, such as an argmax over left-out outputs, is the one difference between their ops; its
    values keep their defaults.
    """
    source, target, actions = made.trace, step.trace, made.actions
    names, others = ([op.name for op in trace.ops] for trace in (source, target))
    start = _n_equal(names, others)
    end = len(names) - _n_equal(names[start:][::-1], others[start:][::-1])
    shift = len(target.values) - len(source.values)
    makers = {value: source.values[value].op for value in actions}
    kept = {v + (shift if makers[v] >= end else 0): a for v, a in actions.items() if not start <= makers[v] < end}
    return judge(step, kept)


def _n_equal(names: Sequence[str], others: Sequence[str]) -> int:
    """Number of names that two lists begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(names, others, strict=False)))


def _not_even_one(
    sample: Prepared, limit_bytes: int, policy: str | Policy | Choose, asked: str, most_time: float
) -> InfeasibleBudgetError:
    """The planner's own error for one sample, which names the budget that it takes."""
    problem = f"Not even one sample fits the budget of {asked}"
    try:
        made = plan(sample, limit_bytes, policy)
    except InfeasibleBudgetError as error:
        return InfeasibleBudgetError(f"{problem}. {error.problem}", error.hint, least_peak_bytes=error.least_peak_bytes)
    slowdown = made.seconds / sample.trace.seconds if sample.trace.seconds else 1.0
    if slowdown > most_time:
        return InfeasibleBudgetError(
            f"{problem} in {most_time:g} of the time of a plain step: its plan takes {slowdown:.2f}",
            f"Allow more by max_slowdown={1.05 * slowdown:.2f}.",
            least_peak_bytes=made.peak_bytes,
        )
    reserved = made.reserved.budget_bytes
    or_else = "" if expandable_segments() else ", or let PYTORCH_CUDA_ALLOC_CONF allow expandable segments"
    return InfeasibleBudgetError(
        f"{problem}: its tensors take {format_bytes(made.peak_bytes)}, for which CUDA's allocator reserves "
        f"{format_bytes(reserved)}",
        f"Write a budget of {format_bytes(reserved)}{or_else}.",
        least_peak_bytes=reserved,
    )


def largest(holds: Callable[[int], bool], known: int, most: int, near: int | None = None, share: float = 0.0) -> int:
    """The largest number up to ``most`` for which something holds that holds for all smaller ones.

    Args:
        holds: Asked O(log) times.
        known: A number for which it holds already.
        most: Largest number to try.
        near: A number near the answer, from which it is looked for in steps that double; by default twice the known.
        share: Of the answer, by which it may be too small.
    """
    low, high = known, most + 1
    probe, step = (known + max(known, 1), max(known, 1)) if near is None else (near, max(1, near >> 4))
    held = first = None
    while high - low > max(1, int(share * low)) and held is first:
        probe = min(max(probe, low + 1), high - 1)
        held = holds(probe)
        first = held if first is None else first
        low, high = (probe, high) if held else (low, probe)
        probe, step = (probe + step if held else probe - step), 2 * step
    while high - low > max(1, int(share * low)):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
