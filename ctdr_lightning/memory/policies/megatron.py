"""Selective recomputation: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models".

MLSys 2023, arXiv 2205.05198; the choice of modules as in Megatron-LM's ``recompute_modules``.

Reproduced: outputs of layers with weights and the residual stream are kept; outputs of attention's core (products of
    activations, softmax), the only part whose size grows with the square of the sequence, are recomputed; on the next
    level also the outputs of norms and activation functions.
Modelled: the parts are found by the kinds of their ops, not by module names, so that any model can be planned.
Left out: sequence and tensor parallelism, the paper's other half.

Complexity O(n).
"""

from __future__ import annotations

from collections.abc import Callable

from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.policies.registry import POLICIES
from ctdr_lightning.memory.search.best_candidate import choose
from ctdr_lightning.memory.simulator.actions import KEEP, RECOMPUTE, Actions
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.op_kinds import is_attention_core, is_cheap, is_weighted
from ctdr_lightning.memory.traces.trace import OpRecord, Trace


@POLICIES.register("megatron")
def megatron(step: Prepared, budget: Budget) -> Timeline:
    """Recompute nothing, attention's core, or that and the outputs of norms and activation functions.

    Raises:
        InfeasibleBudgetError: If no level fits.
    """
    trace = step.trace
    made = {v for v, record in enumerate(trace.values) if record.op >= 0}
    levels: tuple[Callable[[OpRecord], bool], ...] = (
        lambda op: False,
        is_attention_core,
        lambda op: is_attention_core(op) or (is_cheap(op) and len(made.intersection(op.inputs)) == 1),
    )
    return choose(step, (recompute_outputs(trace, level) for level in levels), budget, "megatron")


def recompute_outputs(trace: Trace, chosen: Callable[[OpRecord], bool]) -> Actions:
    """Recompute the outputs of the chosen ops; hold those of the others, so that no replay goes beyond them."""
    makers = {v: trace.ops[trace.values[v].op] for v in trace.droppable}
    recomputed = {v: RECOMPUTE for v, op in makers.items() if trace.values[v].saves and chosen(op)}
    if not recomputed:
        return {}
    held = {v: KEEP for v, op in makers.items() if not trace.values[v].saves and is_weighted(op) and not chosen(op)}
    return {**held, **recomputed}
