"""Sublinear memory cost: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

Reproduced: a chain of n stages is cut into about sqrt(n) segments; the value at each cut is kept, everything inside a
    segment is dropped and made again when the backward enters the segment. The last segment is kept, as its replay
    would follow its forward at once. Segments are balanced by the bytes that they save rather than by the number of
    stages, which is the same on the paper's chain of equal stages. Left out: the budgeted greedy variant (its plans are
    found by ``optimal``). Complexity O(n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.chain import Chain, find_chain
from ctdr_lightning.memory.simulator.actions import Action, Actions
from ctdr_lightning.memory.simulator.prepared import Prepared


@POLICIES.register("sqrt")
def sqrt(step: Prepared, budget: Budget) -> Actions:
    """Keep the values at about the root of n cuts; drop the rest.

    Keep about sqrt(n) cut values of the net's chain; all other saved values are recomputed.
    """
    chain = find_chain(step.trace)
    return segment_actions(chain, balanced_cuts(chain, math.isqrt(max(len(chain.stages), 1))))


def balanced_cuts(chain: Chain, n_segments: int) -> list[int]:
    """Stages after which to cut, so that the segments save about equally many bytes."""
    total = sum(stage.saved_bytes for stage in chain.stages)
    cuts: list[int] = []
    so_far = 0
    for index, stage in enumerate(chain.stages[:-1]):
        so_far += stage.saved_bytes
        if so_far * n_segments >= total * (len(cuts) + 1) and len(cuts) < n_segments - 1:
            cuts.append(index)
    return cuts


def segment_actions(chain: Chain, cuts: Sequence[int]) -> dict[int, Action]:
    """Actions that keep the values at the cuts and drop those inside every segment but the last."""
    last = cuts[-1] if cuts else -1
    return chain.actions(kept_stages=set(cuts), dropped_stages=set(range(last + 1)))
