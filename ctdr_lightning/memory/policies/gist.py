"""Saved tensors are encoded by who reads them.

Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA 2018.

Reproduced: Binarize (a ReLU that pooling and its own backward read needs a bit an element; pooling's argmax few bits);
    sparse storage, dense compute, of other ReLU outputs, and of max-pooling after them, where more than a fifth was
    zero in the recorded step; delayed precision reduction of every other float, after the last forward use and only
    where the user allows a lossy codec.
Modelled: sparse rows are a bit mask and the elements (``zvc``); an argmax takes 16 bits, not 4; reduced precision is
    float8 or bfloat16, which PyTorch has, in the place of FP10 and FP16. The encodings are a ladder: none, all
    lossless ones, all lossy ones as well.
Left out: in-place ReLU, which is the model's choice; sparse storage where nobody counted zeros (fake tensors, named
    devices).
Claimed: half the memory at most, 1.8 times less on average, 4 % slower.

Complexity O(n).
"""

from __future__ import annotations

from collections.abc import Iterator

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.search.others import free_codecs
from ctdr_lightning.memory.simulator.actions import Action, Actions, Compress, Keep
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.trace import Trace

SPARSE = 0.2  # the paper: encoding in sparse rows pays above 20 to 25 % zeros
REDUCED = ("fp8", "bf16")  # the smaller first


@POLICIES.register("gist", uses=frozenset({Keep, Compress}), exact=False)
def gist(step: Prepared, budget: Budget) -> Timeline:
    """Encode as far as the budget requires: nothing, losslessly, or in reduced precision.

    Raises:
        InfeasibleBudgetError: If no encoding that is allowed fits.
    """
    return choose(step, _plans(step.trace), budget, "gist")


def _plans(trace: Trace) -> Iterator[Actions]:
    known = {cost.name for cost in trace.codecs}
    facts = facts_of(trace)
    lossless = free_codecs(trace)
    sparse = [v for v in trace.saved if "zeros" in facts[v].kinds and facts[v].zeros > SPARSE and v not in lossless]
    if "zvc" in known:
        lossless |= {v: Compress(("zvc",)) for v in sparse}
    yield {}
    yield lossless
    for name in REDUCED:
        if name in known:
            reduced: dict[int, Action] = {v: Compress((name,)) for v in trace.saved if "float" in facts[v].kinds}
            yield reduced | lossless
