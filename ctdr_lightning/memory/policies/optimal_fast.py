"""The checkpoint subset of a chain with the least peak where checkpoints behind the segment at work are already freed.

The backward enters the segments from the last to the first. At a segment, the checkpoints after it have been used and
are gone, so that the peak is the largest of (checkpoints before the segment + the segment). Compared with
``optimal`` this objective is both truer and easier: the needs of the rest of the chain do not depend on its beginning.
Hong, Tsai, Wang, Liu and Wu, arXiv 2502.12499, also revise the objective of ``optimal`` by what they trace, and find
its best subset in O(n). Whether their objective is this one was not checked: only the abstract was at hand.

Reproduced: the optimum by one pass from the chain's end, and under a budget the fastest subset, which is the one whose
    last checkpoint is the earliest, by one pass from its start; both O(n^2). The setting is that of Chen et al., arXiv
    1604.06174, and Feng and Huang, arXiv 1808.00079.
Modelled: the simulator adds the bytes outside of the model's peak, as in ``optimal``.
Left out: the O(n) algorithm of Hong et al.

Complexity O(n^2) for a subset; the policy asks for one for each last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.optimal import MOST_STAGES, Sizes, Subset, best_subset, prefix_bytes, walk
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.chain import find_chain
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.timeline import Timeline


@POLICIES.register("optimal_fast")
def optimal_fast(step: Prepared, budget: Budget) -> Timeline:
    """Keep the cut values that give the least peak when used checkpoints are freed; drop the rest.

    Under a budget: the fastest such subset that fits.
    """
    chain = find_chain(step.trace).coarser(MOST_STAGES)
    subsets = [least_peak(chain.stages, last) for last in range(-1, len(chain.stages) - 1)]
    return best_subset(step, chain, subsets, budget, "optimal_fast")


def least_peak(stages: Sequence[Sizes], last: int | None = None) -> Subset:
    """The subset of least peak: the largest of (checkpoints before a segment + the segment).

    Args:
        stages: The chain; ``optimal`` defines the bytes of a segment.
        last: The last checkpoint; -1 for none, None to leave it free.
    """
    total, ends = prefix_bytes(stages)
    n = len(stages)
    need: list[float] = [float("inf")] * n
    then = [n] * n
    for i in range(n - 2 if last is None else last, -2, -1):
        if last is None or i == last:
            need[i + 1] = total[n] - total[i + 1]
        for j in range(i + 1, n - 1 if last is None else last + 1):
            peak = max(ends[j] - total[i + 1], stages[j].output_bytes + need[j + 1])
            if peak < need[i + 1]:
                need[i + 1], then[i + 1] = peak, j
    cuts, at = [], then[0]
    while at < n:
        cuts.append(at)
        at = then[at + 1]
    return Subset(int(need[0]), tuple(cuts))


def fastest_under(stages: Sequence[Sizes], budget_bytes: int) -> Subset | None:
    """The subset that recomputes the least under a budget; None if no subset fits.

    All stages before the last checkpoint run their forward once more, so the earliest possible last checkpoint is best;
    on the way, holding fewer bytes is never worse.
    """
    total, ends = prefix_bytes(stages)
    kept: list[float] = [0]
    parent: list[int] = []
    for j in range(-1, len(stages) - 1):
        if j >= 0:
            fitting = ((kept[i + 1], i) for i in range(-1, j) if kept[i + 1] + ends[j] - total[i + 1] <= budget_bytes)
            before, i = min(fitting, default=(float("inf"), -1))
            kept.append(before + stages[j].output_bytes)
            parent.append(i)
        if kept[j + 1] + total[-1] - total[j + 1] <= budget_bytes:
            return with_peak(stages, walk(parent, j))
    return None


def with_peak(stages: Sequence[Sizes], cuts: tuple[int, ...]) -> Subset:
    """A given subset with its peak."""
    total, ends = prefix_bytes(stages)
    peak = held = before = 0
    for cut in cuts:
        peak = max(peak, held + ends[cut] - total[before])
        held, before = held + stages[cut].output_bytes, cut + 1
    return Subset(max(peak, held + total[-1] - total[before]), cuts)
