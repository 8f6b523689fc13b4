"""The checkpoint subset of a chain with the least peak, where that is all checkpoints + the largest segment.

This is the objective of Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, whose budgeted
search is greedy, of Feng and Huang, arXiv 1808.00079, who solve it exactly, and of the O(n^3) dynamic program of Hong,
Tsai, Wang, Liu and Wu, arXiv 2502.12499.

Reproduced: the exact optimum for stages of any sizes, and under a budget the fastest subset, which is the one whose
    last checkpoint is the earliest: every segment before it runs its forward once more, the one behind it is kept.
Modelled: the simulator adds the bytes outside of the model's peak (workspaces, gradients, small values), and chooses
    among the best subsets for each last checkpoint.
Left out: nothing. A net without cut points is a chain of one stage, and its only plan keeps everything.

Complexity O(n^3): for each of at most n^2 sizes of the largest segment one shortest path, O(n) by a sliding minimum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.policies.sqrt import segment_actions
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.chain import Chain, find_chain
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline

# Of longer chains neighbours are joined: the search is cubic, as is rotor's.
MOST_STAGES = 128
# How many subsets are simulated where the least peak is looked for: the model leaves gradients and workspaces out, so
# that its first is not always the simulator's. Not tuned.
N_LIGHTEST = 16


class Sizes(Protocol):
    """Bytes of one stage of a chain; a ``Stage`` has them."""

    @property
    def output_bytes(self) -> int:
        """Its output, where that is a checkpoint."""

    @property
    def inner_bytes(self) -> int:
        """Bytes saved inside of it, without its output."""

    @property
    def saved_bytes(self) -> int:
        """All that is saved of it."""


@dataclass(frozen=True, slots=True)
class Subset:
    """Checkpoints of a chain.

    Attributes:
        peak_bytes: The chain's peak under them.
        cuts: Stages whose output is kept, in order.
    """

    peak_bytes: int
    cuts: tuple[int, ...]


@POLICIES.register("optimal")
def optimal(step: Prepared, budget: Budget) -> Timeline:
    """Keep the cut values that give the least peak, all checkpoints + the largest segment; drop the rest.

    Under a budget: the fastest such subset that fits.
    """
    chain = find_chain(step.trace).coarser(MOST_STAGES)
    return best_subset(step, chain, least_peak_by_last(chain.stages), budget, "optimal")


def best_subset(step: Prepared, chain: Chain, subsets: Sequence[Subset], budget: Budget, policy: str) -> Timeline:
    """Take the best of the subsets, which come from the fastest to the slowest, as the simulator sees them.

    Under a limit on the peak it is the first that fits. A subset that misses it by some bytes rules out those whose
    peak on the chain is not lower by half as much, so that few need be simulated.
    """
    light_enough = float("inf")
    for subset in subsets if budget.peak_bytes is not None else ():
        if subset.peak_bytes <= light_enough:
            timeline = judge(step, segment_actions(chain, subset.cuts))
            excess = timeline.peak_bytes - (budget.peak_bytes or 0)
            if excess <= 0:
                return timeline
            light_enough = min(light_enough, subset.peak_bytes - excess / 2)
    lightest = sorted(subsets, key=lambda s: s.peak_bytes)[:N_LIGHTEST]
    return choose(step, (segment_actions(chain, s.cuts) for s in lightest), budget, policy, chain.note)


def least_peak_by_last(stages: Sequence[Sizes]) -> list[Subset]:
    """For each last checkpoint the subset of least peak: bytes of all checkpoints + bytes of the largest segment.

    Args:
        stages: The chain. A segment holds the saved values of its stages, but not the output of its last stage, which
            is the next checkpoint.

    Returns:
        First the subset without any checkpoint, then one for each stage but the last; so from the fastest to the
        slowest.
    """
    total, ends = prefix_bytes(stages)
    n = len(stages)
    best = [Subset(total[n], ())]
    best += [Subset(s.output_bytes + max(ends[j], total[n] - total[j + 1]), (j,)) for j, s in enumerate(stages[:-1])]
    for limit in sorted({ends[j] - total[i] for j in range(n - 1) for i in range(j + 1)}):
        if limit >= max(s.peak_bytes for s in best):
            break
        kept, parent = _lightest_paths([s.output_bytes for s in stages], total, ends, limit)
        for last, n_bytes in enumerate(kept):
            peak = n_bytes + max(limit, total[n] - total[last + 1])
            if peak < best[last + 1].peak_bytes:
                best[last + 1] = Subset(int(peak), walk(parent, last))
    return best


def _lightest_paths(
    outputs: Sequence[int], total: Sequence[int], ends: Sequence[int], limit: int
) -> tuple[list[float], list[int]]:
    """For each checkpoint the fewest bytes kept up to it, with no segment over the limit; and the one before it."""
    kept: list[float] = []
    parent: list[int] = []
    window: deque[tuple[float, int]] = deque([(0, -1)])
    for j in range(len(outputs) - 1):
        while window and total[window[0][1] + 1] < ends[j] - limit:
            window.popleft()
        before, i = window[0] if window else (float("inf"), -1)
        kept.append(before + outputs[j])
        parent.append(i)
        while window and window[-1][0] >= kept[j]:
            window.pop()
        window.append((kept[j], j))
    return kept, parent


def prefix_bytes(stages: Sequence[Sizes]) -> tuple[list[int], list[int]]:
    """Bytes saved before each stage (one more entry than stages), and those with the inside of the stage."""
    total = list(accumulate((s.saved_bytes for s in stages), initial=0))
    return total, [before + s.inner_bytes for before, s in zip(total, stages, strict=False)]


def walk(parent: Sequence[int], last: int) -> tuple[int, ...]:
    """The path that ends at ``last``: each entry's parent, back to -1."""
    cuts = []
    while last >= 0:
        cuts.append(last)
        last = parent[last]
    return tuple(reversed(cuts))
