"""Swapped tensors are compressed where that makes the swap shorter.

Chen et al., "CSWAP: A Self-Tuning Compression Framework for Accelerating Tensor Swapping in GPUs", IEEE CLUSTER 2021.

Reproduced: of vDNN's transfers of every layer's input those are compressed whose exposed part gets shorter: the time to
    encode, to move the compressed bytes, and to decode, against the time to move the tensor, both ways. The
    compressed bytes follow from the zeros of the recorded step, with 10 % more elements than these leave. Two models
    are fitted to measurements of this machine: transfer time by bytes, codec time by bytes and share of zeros. As the
    zeros change over epochs, the choice is made anew.
Modelled: the part of a transfer that the layer's own forward and backward hide is not exposed. The models are a line
    and non-negative least squares (``holders/measure.py``), not the paper's regressions. One step in 500 counts zeros;
    there is a new plan where a value has over 10 % more or fewer elements left (``tape/zero_watch.py``).
Left out: its other codecs; Bayesian optimisation of the codec's launch parameters.
Claimed: swaps take half the time (50.9 % less), training 20.7 % less than with vDNN.

Complexity O(n log n).
"""

from __future__ import annotations

from dataclasses import replace

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.cdma import ZERO_VALUE
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.policies.vdnn import moved
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.simulator.actions import Action, Actions, Keep, Offload
from ctdr_lightning.memory.simulator.away import away_bytes, codec_cost, link_to
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.trace import Trace


@POLICIES.register("cswap", uses=frozenset({Keep, Offload}))
def cswap(step: Prepared, budget: Budget) -> Timeline:
    """Move nothing, or the input of every layer, compressed where that pays.

    Raises:
        InfeasibleBudgetError: If neither fits.
    """
    return choose(step, [{}, _tuned(step)], budget, "cswap")


def _tuned(step: Prepared) -> Actions:
    actions: dict[int, Action] = dict(moved(step, convolutions_alone=False))
    trace = step.trace
    if not any(cost.name == ZERO_VALUE for cost in trace.codecs):
        return actions
    facts = facts_of(trace)
    for value, action in actions.items():
        if isinstance(action, Offload) and "zeros" in facts[value].kinds and _pays(trace, value, action.to):
            actions[value] = replace(action, codecs=(ZERO_VALUE,))
    return actions


def _pays(trace: Trace, value: int, to: str) -> bool:
    """Whether the exposed part of a swap is shorter with the codec."""
    cost, link, n_bytes = codec_cost(trace, ZERO_VALUE), link_to(trace, to), trace.value_bytes(value)
    hidden_s = trace.ops[trace.values[value].op].seconds
    dense = sum(max(seconds - hidden_s, 0.0) for seconds in link.seconds(n_bytes))
    packed = link.seconds(away_bytes(trace, value, (ZERO_VALUE,)))
    zeros = facts_of(trace)[value].zeros
    codec_s = cost.encode_seconds(n_bytes, zeros) + cost.decode_seconds(n_bytes, zeros)
    return codec_s + sum(max(seconds - hidden_s, 0.0) for seconds in packed) < dense
