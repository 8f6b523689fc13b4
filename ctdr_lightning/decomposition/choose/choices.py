"""The decisions as data: read from JSON primitives, checked against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.rank import explicit
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.methods import METHODS, Candidate

PLAN_VERSION = 1
_HINT = "Use what report.to_plan() gave, or edit a copy of it."


def read_plan(plan: Mapping[str, Any], layers: Sequence[Layer]) -> dict[str, Candidate | str]:
    """What a plan says of each layer: a candidate, or the reason to leave it dense.

    Args:
        plan: ``{"version": 1, "layers": {name: {"decision", "reason", "method", "ranks"}}}``.
        layers: The model's layers.

    Returns:
        An entry for every layer; layers the plan does not name stay as they are.

    Raises:
        ConfigError: When the plan is malformed, names a layer the model has not, or asks for what a layer cannot be.
    """
    entries = _entries(plan)
    known = {layer.name: layer for layer in layers}
    unknown = [name for name in entries if name not in known]
    if unknown:
        raise ConfigError(f"plan: layer {unknown[0]!r} is not in the model.", f"Layers: {', '.join(list(known)[:8])}.")
    return {name: _decision(layer, entries.get(name)) for name, layer in known.items()}


def _entries(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(plan, Mapping) or plan.get("version") != PLAN_VERSION:
        found = plan.get("version") if isinstance(plan, Mapping) else type(plan).__name__
        raise ConfigError(f"plan: version {found!r} found, {PLAN_VERSION} expected.", _HINT)
    entries = plan.get("layers")
    if not isinstance(entries, Mapping) or not all(isinstance(e, Mapping) for e in entries.values()):
        raise ConfigError("plan: 'layers' must map layer names to decisions.", _HINT)
    return entries


def _decision(layer: Layer, entry: Mapping[str, Any] | None) -> Candidate | str:
    if entry is None:
        return "not in the plan"
    if entry.get("decision") not in ("factorized", "dense"):
        raise ConfigError(
            f"plan: layer {layer.name!r}: decision {entry.get('decision')!r}.", '"factorized" or "dense".'
        )
    if entry["decision"] == "dense":
        return str(entry.get("reason", "the plan says so"))
    method, ranks = entry.get("method"), entry.get("ranks")
    if (
        not isinstance(method, str)
        or not isinstance(ranks, list | tuple)
        or not ranks
        or not all(type(r) is int for r in ranks)
    ):
        raise ConfigError(f"plan: layer {layer.name!r}: method {method!r} with ranks {ranks!r}.", _HINT)
    return _factorized(layer, method, tuple(ranks))


def _factorized(layer: Layer, method: str, ranks: tuple[int, ...]) -> Candidate | str:
    module = layer.module
    if layer.refusal:
        if getattr(module, "method", None) == method and module.ranks == ranks:
            return layer.refusal
        raise ConfigError(f"plan: layer {layer.name!r} cannot be factorized: {layer.refusal}.", "merge(model) first.")
    assert layer.geometry is not None
    if not METHODS[method].supports(layer.geometry):
        raise ConfigError(f"plan: method {method!r} does not fit layer {layer.name!r} ({layer.kind}).", _HINT)
    return explicit(METHODS[method], layer.geometry, ranks, f"plan: layer {layer.name!r}")
