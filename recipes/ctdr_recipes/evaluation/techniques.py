"""Five ways to train one network: unchanged, smaller, with less kept, with less held here, and CTDR.

Each but the first two is planned for the same share of the dense step's peak, so that their times can be compared: the
peak is given, the time is what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
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
from ctdr_lightning.memory import Plan, Trace, plan
from ctdr_lightning.memory.holders.places import Places

DENSE, DECOMPOSED, RECOMPUTED, OFFLOADED, CTDR = "dense", "decomposition", "recomputation", "offload", "CTDR"
TECHNIQUES = (DENSE, DECOMPOSED, RECOMPUTED, OFFLOADED, CTDR)
SHARE = 0.25  # of each layer's parameters; the first and the last layer stay dense
BUDGET_SHARE = 0.45  # of the dense step's peak
# Policies that put tensors away and make none again; the fastest plan of them that fits is taken.
_MOVERS = ("vdnn_plus", "tflms")
# A search that is asked again does not always find the very same least peak: 2 % is given on top, 5 % if need be.
_ROOM = (1.02, 1.05, 1.2)


@dataclass(frozen=True)
class Outcome:
    """A step under one technique.

    Attributes:
        plan: The fastest plan found for the limit; where none fits, one near the least peak that was found.
        fits: Whether it is within the limit.
    """

    plan: Plan
    fits: bool


Planner = Callable[[Trace, int], Outcome]
PLANNERS: Registry[Planner] = Registry("technique")


def shapes_at(model: nn.Module, share: float = SHARE) -> Choices:
    """Ranks that leave each layer a share of its parameters: one number for all ranks of a layer.

    Nothing is solved, so that a network may be on the meta device: bytes and seconds depend on shapes alone.

    Args:
        model: Dense.
        share: Of each layer's parameters.
    """
    layers = [(name, layer, kind_of(layer)) for name, layer in walk(model)]
    known = [(name, KINDS[kind].geometry(layer)) for name, layer, kind in layers if kind is not None]
    found = {name: _choice(geometry, share) for name, geometry in known[1:-1]}
    return Choices({name: choice for name, choice in found.items() if choice is not None})


def _choice(geometry: Geometry, share: float) -> LayerChoice | None:
    allowed = int(share * geometry.n_weights)
    for method in candidates(["auto"], geometry):
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
    made = plan(trace, policy="keep")
    return Outcome(made, made.peak_bytes <= limit_bytes)


@PLANNERS.register(RECOMPUTED)
@PLANNERS.register(CTDR)
def recompute(trace: Trace, limit_bytes: int) -> Outcome:
    """The fastest plan of recomputation that fits."""
    return _planned(trace, limit_bytes, "auto")


@PLANNERS.register(OFFLOADED)
def offload(trace: Trace, limit_bytes: int) -> Outcome:
    """The fastest plan that moves tensors over the trace's link and makes none again."""
    outcomes = [_planned(trace, limit_bytes, policy) for policy in _MOVERS]
    fitting = [outcome for outcome in outcomes if outcome.fits]
    if fitting:
        return min(fitting, key=lambda outcome: outcome.plan.seconds)
    return min(outcomes, key=lambda outcome: outcome.plan.peak_bytes)


def _planned(trace: Trace, limit_bytes: int, policy: str) -> Outcome:
    least = 0
    for room in (0.0, *_ROOM):
        try:
            return Outcome(plan(trace, limit_bytes if not room else int(room * least), policy), not room)
        except InfeasibleBudgetError as error:
            least = max(least, error.least_peak_bytes)
    return Outcome(plan(trace, policy="keep"), False)


def least_bytes(technique: str, trace: Trace, limit_bytes: int = 1) -> int:
    """The peak of a plan of decomposition or recomputation for a limit; where none fits, the least that was found."""
    if technique in (DENSE, DECOMPOSED):
        return plan(trace, policy="keep").peak_bytes
    try:
        return plan(trace, limit_bytes).peak_bytes
    except InfeasibleBudgetError as error:
        return error.least_peak_bytes


def with_link(trace: Trace, device: str) -> Trace:
    """A trace on a named GPU whose host memory can be used."""
    return Places.read("host", None, None).equip(trace, device)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A network without its memory."""
    with torch.device("meta"):
        return build().train()
