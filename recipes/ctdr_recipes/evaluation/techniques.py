"""Ways to train one network: unchanged, smaller, with less kept, with less held here, and CTDR.

All are held to the same limits, shares of the dense step's peak, so that their times can be compared: the peak is
given, the time is what it costs. None takes a plan from another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.decomposition import Choices
from ctdr_lightning.decomposition.choose.choices import LayerChoice
from ctdr_lightning.decomposition.choose.request import candidates
from ctdr_lightning.decomposition.layers.surgery import walk
from ctdr_lightning.decomposition.methods.base import Method, Ranks
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of
from ctdr_lightning.memory import POLICIES, Plan, Trace
from ctdr_lightning.memory.holders.places import Places
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.simulator.actions import Keep, Offload
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline

DENSE, DECOMPOSED, CHECKPOINTED = "dense", "decomposition", "checkpoint a block"
RECOMPUTED, OFFLOADED, EXACT, CTDR = "recomputation", "offload", "CTDR exact", "CTDR with ranks"
TECHNIQUES = (DENSE, DECOMPOSED, CHECKPOINTED, RECOMPUTED, OFFLOADED, EXACT, CTDR)
SHARE = 0.25  # of each layer's parameters; the first and the last layer stay dense
LIMITS = (0.8, 0.6, 0.45, 0.3)  # of the dense step's peak
BUDGET_SHARE = 0.45  # the limit of the promise and of the main tables
# Policies that raise an error name the least peak that they found; so much more lets them make that plan again.
_ROOM = (1.0, 1.02, 1.05)
USUAL_S = Budget().time_limit_s


@dataclass(frozen=True)
class Outcome:
    """A step under one technique.

    Attributes:
        plan: The fastest plan found for the limit; where none fits, the one with the least peak that was found.
        fits: Whether it is within the limit.
        means: What it does, in words.
    """

    plan: Plan
    fits: bool
    means: str = ""


Planner = Callable[[Trace, int], Outcome]
PLANNERS: Registry[Planner] = Registry("technique")


def shapes_at(model: nn.Module, share: float = SHARE, methods: Sequence[str] = ("auto",)) -> Choices:
    """Ranks that leave each layer a share of its parameters: one number for all ranks of a layer.

    Nothing is solved, so that a network may be on the meta device: bytes and seconds depend on shapes alone.

    Args:
        model: Dense.
        share: Of each layer's parameters.
        methods: Names of methods; a layer takes the first that fits it.
    """
    layers = [(name, layer, kind_of(layer)) for name, layer in walk(model)]
    known = [(name, KINDS[kind].geometry(layer)) for name, layer, kind in layers if kind is not None]
    found = {name: _choice(geometry, share, methods) for name, geometry in known[1:-1]}
    return Choices({name: choice for name, choice in found.items() if choice is not None})


def _choice(geometry: Geometry, share: float, methods: Sequence[str]) -> LayerChoice | None:
    allowed = int(share * geometry.n_weights)
    for method in candidates(methods, geometry):
        ranks = _largest_ranks(method, geometry, allowed)
        if ranks is not None:
            return LayerChoice(method.name, ranks, f"{share:.0%} of its parameters")
    return None


def _largest_ranks(method: Method, geometry: Geometry, allowed: int) -> Ranks | None:
    low, high = 0, max(method.max_ranks(geometry))
    while low < high:
        middle = (low + high + 1) // 2
        fits = method.n_parameters(geometry, method.uniform(geometry, middle)) <= allowed
        low, high = (middle, high) if fits else (low, middle - 1)
    return method.uniform(geometry, low) if low else None


@PLANNERS.register(DENSE)
@PLANNERS.register(DECOMPOSED)
def keep(trace: Trace, limit_bytes: int) -> Outcome:
    """Everything is kept, whatever the limit."""
    return fastest(trace, limit_bytes, ())


@PLANNERS.register(RECOMPUTED)
@PLANNERS.register(CTDR)
def recompute(trace: Trace, limit_bytes: int) -> Outcome:
    """The fastest plan of ``auto`` that fits: recomputation, and transfers where the trace has links."""
    return fastest(trace, limit_bytes, ("auto",))


@PLANNERS.register(OFFLOADED)
def offload(trace: Trace, limit_bytes: int) -> Outcome:
    """The fastest plan that moves tensors over the trace's links and makes none again, of all policies that do so."""
    return fastest(trace, limit_bytes, movers())


def movers() -> tuple[str, ...]:
    """Names of the policies that move tensors and never recompute: to the bit, as no codec is asked for."""
    moving = frozenset({Keep, Offload})
    return tuple(name for name in POLICIES if POLICIES[name].uses == moving)


def fastest(
    step: Trace | Prepared, limit_bytes: int, policies: Sequence[str], time_limit_s: float = USUAL_S
) -> Outcome:
    """The fastest plan of some policies that fits; where none does, the one with the least peak.

    Peaks are of tensors. A GPU's allocator is asked of none, as the recorded techniques cannot be planned around it.

    Args:
        step: The recorded step.
        limit_bytes: Largest peak.
        policies: Their names. The plan that keeps everything is always among the plans.
        time_limit_s: For each policy's search.
    """
    step = prepared(step)
    made = [Plan("keep", judge(step, {}), limit_bytes)]
    for name in policies:
        budget = Budget(peak_bytes=limit_bytes, time_limit_s=time_limit_s)
        made += [Plan(name, timeline, limit_bytes) for timeline in _timelines(step, budget, name)]
    fitting = [plan for plan in made if plan.peak_bytes <= limit_bytes]
    best = min(fitting, key=_by_seconds) if fitting else min(made, key=lambda plan: (plan.peak_bytes, plan.seconds))
    return Outcome(best, bool(fitting), _means(best))


def _by_seconds(plan: Plan) -> tuple[float, int]:
    return plan.seconds, plan.peak_bytes


def _timelines(step: Prepared, budget: Budget, policy: str) -> Iterator[Timeline]:
    """A policy's plan; where it finds none, the one near the least peak that it names."""
    limit = budget.peak_bytes
    assert limit is not None
    for room in (None, *_ROOM):
        asked = limit if room is None else int(room * limit)
        try:
            yield POLICIES[policy](step, Budget(peak_bytes=asked, time_limit_s=budget.time_limit_s))
            return
        except InfeasibleBudgetError as error:
            limit = max(limit, error.least_peak_bytes)


def _means(plan: Plan) -> str:
    """A plan in words; empty where it keeps everything."""
    done = {"recomputes": plan.timeline.replays, "moves": len(plan.away)}
    parts = [f"{word} {n}" for word, n in done.items() if n]
    return f"{plan.policy}: {', '.join(parts)}" if parts else ""


def with_link(trace: Trace, device: str) -> Trace:
    """A trace on a named GPU whose host memory can be used."""
    return Places.read("host", None, None).equip(trace, device)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A network without its memory."""
    with torch.device("meta"):
        return build().train()
