"""Counts zeros in the steps of a plan, now and then: activations become sparser or denser while training goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from ctdr_lightning.memory.codecs.zvc import n_kept
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.simulator.away import MORE_ELEMENTS
from ctdr_lightning.memory.traces.facts import facts_of

# As often as a step is verified anew. Counting reads each moved output of a ReLU once.
STEPS_BETWEEN = 500


class ZeroWatch:
    """Knows how many zeros the values of a plan have that wait elsewhere, where a codec of its machine drops zeros.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        away = plan.away if any(cost.drops_zeros for cost in plan.trace.codecs) else {}
        facts = facts_of(plan.trace) if away else ()
        self._seen = {v: facts[v].zeros for v in away if "zeros" in facts[v].kinds}
        self._kept: dict[int, tuple[Tensor, int]] = {}
        self._n_steps = 0

    def begin(self) -> None:
        """A step under the plan begins."""
        self._n_steps += 1
        self._kept.clear()

    def look(self, value: int, tensor: Tensor) -> None:
        """Count in a value that is put away, where the step counts.

        Args:
            value: Its id.
            tensor: Its contents, which fill their storage.
        """
        if value in self._seen and self._n_steps % STEPS_BETWEEN == 0:
            flat = tensor.new_empty(0).set_(tensor.untyped_storage(), 0, (tensor.numel(),), (1,))
            self._kept[value] = n_kept(flat), tensor.numel()

    def moved(self) -> dict[int, float]:
        """The shares of zeros that the step has, by value id; none where all are as planned.

        They moved where a value has over 10 % more elements left than planned, or less: beyond this its bytes exceed
        the planned ones.
        """
        if not self._kept:
            return {}
        counts = torch.stack([count for count, _ in self._kept.values()]).tolist()
        sizes = [n for _, n in self._kept.values()]
        shares = {v: 1 - count / n for v, count, n in zip(self._kept, counts, sizes, strict=True)}
        self._kept.clear()
        left = [(1 - share, 1 - self._seen[v]) for v, share in shares.items()]
        return shares if any(max(pair) > MORE_ELEMENTS * min(pair) for pair in left) else {}
