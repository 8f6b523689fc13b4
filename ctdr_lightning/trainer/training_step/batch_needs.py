"""What a whole batch takes: a recorded step, what stands beside it, and the optimizer's step after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import Trace, plan, simulate
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes
from ctdr_lightning.memory.helpful_places import held_by_the_program
from ctdr_lightning.memory.traces.trace import StorageRecord
from ctdr_lightning.trainer.training_step.optimizer_bytes import OptimizerBytes


@dataclass(frozen=True)
class BatchNeeds:
    """A step among all that a batch has in memory.

    Attributes:
        step: The recorded step, on a machine with the links and codecs that may be used.
        optimizer: What the optimizers take.
        in_backward: Whether parameters are updated inside the backward.
        kept_bytes: Gradients of the step before, which stand until the backward.
        copied_bytes: Copies that put a failed step back, which stand until the backward is over.
    """

    step: Trace
    optimizer: OptimizerBytes
    in_backward: bool = False
    kept_bytes: int = 0
    copied_bytes: int = 0

    @cached_property
    def standing(self) -> Trace:
        """The step with everything that stands beside it."""
        trace = self.step.with_static(self.optimizer.state + self.copied_bytes)
        trace = _with_live_bytes(trace, self.kept_bytes, 0, max(forward_ticks(trace) - 1, 0))
        backward = [op.tick for op in trace.ops if op.backward]
        if not self.in_backward or not backward:
            return trace
        return _with_live_bytes(trace, self.optimizer.temporary, backward[0], backward[-1])

    @cached_property
    def end_bytes(self) -> int:
        """What is in memory when the backward is over, and the copies are gone."""
        plain = simulate(self.standing).bytes_at
        return (int(plain[-1]) if len(plain) else self.standing.resident_bytes) - self.copied_bytes

    @property
    def rest_bytes(self) -> int:
        """What a batch takes after its backward, while the optimizer steps."""
        return self.end_bytes + (0 if self.in_backward else self.optimizer.temporary)

    @property
    def least_bytes(self) -> int:
        """Below what no plan of the batch goes, found without one."""
        moves = self.step.links or self.step.asked_codecs  # the floor holds for recomputation alone
        return max(self.rest_bytes, (held_by_the_program if moves else floor_bytes)(self.standing))

    def stepping_inside(self, sizes: Iterable[int], optimizer: OptimizerBytes) -> BatchNeeds:
        """The same batch with its parameters updated inside the backward.

        Args:
            sizes: Bytes of each parameter that is trained.
            optimizer: What the optimizer takes then.
        """
        step = _gradients_freed(self.step, sizes)
        return replace(self, step=step, optimizer=optimizer, in_backward=True, kept_bytes=0)

    def adding(self, sizes: list[int]) -> BatchNeeds:
        """The same batch where its gradients are added to others that stand.

        Args:
            sizes: Bytes of each parameter that is trained.
        """
        return replace(self, step=_gradients_freed(self.step, sizes).with_static(sum(sizes)), kept_bytes=0)


def planned_peak_bytes(needs: BatchNeeds, budget_bytes: int, policy: str) -> int:
    """The peak of a batch under its best plan; more than the budget where none fits.

    Args:
        needs: The batch.
        budget_bytes: The budget.
        policy: The memory policy's name.
    """
    least = needs.least_bytes
    if least > budget_bytes:
        return least
    try:
        return max(least, plan(needs.standing, budget_bytes, policy).peak_bytes)
    except InfeasibleBudgetError as error:
        return max(error.least_peak_bytes, budget_bytes + 1)


def forward_ticks(trace: Trace) -> int:
    """How many ticks there are up to the last op of the forward."""
    return max((trace.ops[index].tick for index in trace.forward_ops), default=-1) + 1


def _with_live_bytes(trace: Trace, n_bytes: int, first: int, last: int) -> Trace:
    """A step in which so many more bytes are live from one tick to another."""
    if not n_bytes or not trace.n_ticks:
        return trace
    return replace(trace, storages=(*trace.storages, StorageRecord(n_bytes, first, last)))


def _gradients_freed(trace: Trace, sizes: Iterable[int]) -> Trace:
    """A step in which each gradient is gone after the last op that touches it, rather than staying to the end."""
    left, last = Counter(sizes), _last_touches(trace)
    made = {trace.values[v].storage for op in trace.ops if op.backward for v in op.outputs if v >= 0}
    storages = list(trace.storages)
    for place in sorted(made):
        storage = storages[place]
        if storage.born >= 0 and storage.end >= trace.n_ticks - 1 and left[storage.n_bytes]:
            left[storage.n_bytes] -= 1
            storages[place] = replace(storage, end=last[place])
    return replace(trace, storages=tuple(storages))


def _last_touches(trace: Trace) -> dict[int, int]:
    """By storage the tick of the last op that reads or writes it."""
    return {trace.values[v].storage: op.tick for op in trace.ops for v in (*op.inputs, *op.outputs) if v >= 0}
