"""The account of a batch: a recorded step, the memory beside it, and the optimizer's step after it.

The run, the joint search, the command and the errors all ask this account, so that they agree on what fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, held_by_the_program
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.traces.optimizer import NO_OPTIMIZER, OptimizerBytes
from ctdr_lightning.memory.traces.trace import Trace

# For a list of losses that grows by 4 bytes a step: 1,024 of them before plans are made anew.
LEAST_ROOM_BYTES = 4096


@dataclass(frozen=True)
class BatchAccount:
    """A step among all that a batch has in memory.

    Attributes:
        step: The recorded step, on a machine with the links and codecs that may be used.
        optimizer: Bytes of the optimizers.
        in_backward: Whether parameters are updated inside the backward.
        kept_bytes: Gradients of the step before, which remain until the backward.
        copied_bytes: Copies for a retry, which remain until the backward is over.
        adds: Whether its gradients are added to existing ones, which the step's resident bytes include.
    """

    step: Trace
    optimizer: OptimizerBytes = NO_OPTIMIZER
    in_backward: bool = False
    kept_bytes: int = 0
    copied_bytes: int = 0
    adds: bool = False

    @cached_property
    def standing(self) -> Trace:
        """The step with all resident bytes."""
        trace = self.step.with_static(self.optimizer.state + self.optimizer.standing + self.copied_bytes)
        trace = trace.with_live_bytes(self.kept_bytes, 0, max(trace.forward_ticks - 1, 0))
        backward = [op.tick for op in trace.ops if op.backward]
        if not self.in_backward or not backward:
            return trace
        return trace.with_live_bytes(self.optimizer.temporary, backward[0], backward[-1])

    @cached_property
    def end_bytes(self) -> int:
        """Resident bytes when the backward is over and the copies are gone."""
        plain = simulate(self.standing).bytes_at
        return (int(plain[-1]) if len(plain) else self.standing.resident_bytes) - (
            self.copied_bytes + self.optimizer.standing
        )

    @property
    def rest_bytes(self) -> int:
        """Bytes of a batch after its backward, while the optimizer steps."""
        return self.end_bytes + (0 if self.in_backward else self.optimizer.temporary)

    @property
    def whole(self) -> Trace:
        """The step with all resident bytes and, as its last tick, everything that follows it."""
        trace = self.standing
        left = int(simulate(trace).bytes_at[-1]) if trace.n_ticks else 0
        return trace.with_live_bytes(max(self.rest_bytes - left, 0), trace.n_ticks - 1, trace.n_ticks - 1)

    @cached_property
    def floor_bytes(self) -> int:
        """A peak below which no plan of the batch goes, found without one."""
        moves = self.step.links or self.step.asked_codecs  # the floor holds for recomputation alone
        return max(self.rest_bytes, (held_by_the_program if moves else floor_bytes)(self.standing))

    def peak_bytes(self, made: Plan) -> int:
        """The peak of the batch under a plan of its ``standing`` step."""
        return max(made.peak_bytes, self.rest_bytes)

    def fits(self, made: Plan, budget_bytes: int) -> bool:
        """Whether the batch keeps to a budget under a plan of its ``standing`` step."""
        return self.peak_bytes(made) <= budget_bytes

    def stepping_inside(self, sizes: Iterable[int], optimizer: OptimizerBytes) -> BatchAccount:
        """The same batch with its parameters updated inside the backward.

        Args:
            sizes: Bytes of each parameter that is trained.
            optimizer: Bytes of the optimizer in that case.
        """
        step = _gradients_freed(self.step, sizes)
        return replace(self, step=step, optimizer=optimizer, in_backward=True, kept_bytes=0)

    def adding(self, sizes: list[int]) -> BatchAccount:
        """The same batch with its gradients added to existing ones; itself where they are added already.

        Batches of an accumulation and parts of a batch add to the same gradients.

        Args:
            sizes: Bytes of each parameter that is trained.
        """
        if self.adds:
            return self
        step = _gradients_freed(self.step, sizes).with_static(sum(sizes))
        return replace(self, step=step, kept_bytes=0, adds=True)


def with_room(copied_bytes: int) -> int:
    """The bytes to plan for copies: batches of many sizes have copies of many sizes, and each growth plans all anew."""
    return copied_bytes + max(copied_bytes // 8, LEAST_ROOM_BYTES) if copied_bytes else 0


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
