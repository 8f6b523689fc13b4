"""The choices for each layer, as data: method and ranks, or dense. The decomposition's counterpart of a memory plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.rank import explicit
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.layers.tied import TIED_METHOD
from ctdr_lightning.decomposition.methods import METHODS, Candidate, Ranks

CHOICES_VERSION = 1
_HINT = "Use the result of report.choices.to_dict(), or an edited copy of it."


@dataclass(frozen=True)
class LayerChoice:
    """The choice for one layer.

    Args:
        method: Registered method name; None leaves the layer dense.
        ranks: Ranks of the method, input side first.
        reason: Why, in words.
        error: Relative error expected of the weight (of the outputs where data was given); NaN where nobody looked.
            Not stored.
    """

    method: str | None = None
    ranks: Ranks = ()
    reason: str = ""
    error: float = math.nan

    @classmethod
    def of(cls, candidate: Candidate) -> LayerChoice:
        """The choice of a candidate, with the reason that its error gives."""
        found = "smaller" if math.isnan(candidate.error) else f"least found (expected error {candidate.error:.4f})"
        return cls(candidate.method.name, candidate.ranks, found, candidate.error)

    def to_dict(self) -> dict[str, Any]:
        """The choice as JSON primitives."""
        if self.method is None:
            return {"decision": "dense", "reason": self.reason}
        return {"decision": "factorized", "reason": self.reason, "method": self.method, "ranks": list(self.ranks)}


@dataclass(frozen=True)
class Choices:
    """The choices for the layers of one model. Plain data: saved as JSON, edited, and applied again.

    Args:
        layers: A choice by layer name; layers not named stay as they are.

    Example:
        >>> choices = Choices({"0": LayerChoice("svd", (4,))})
        >>> Choices.from_dict(choices.to_dict()).layers["0"].ranks
        (4,)
    """

    layers: Mapping[str, LayerChoice]

    def to_dict(self) -> dict[str, Any]:
        """The choices as JSON primitives."""
        layers = {name: choice.to_dict() for name, choice in self.layers.items()}
        return {"version": CHOICES_VERSION, "layers": layers}

    @classmethod
    def from_dict(cls, plain: Any) -> Choices:
        """Read the output of `to_dict`.

        Raises:
            ConfigError: If it is malformed or of another version.
        """
        if not isinstance(plain, Mapping) or plain.get("version") != CHOICES_VERSION:
            found = plain.get("version") if isinstance(plain, Mapping) else type(plain).__name__
            raise ConfigError(f"choices: version {found!r} found, {CHOICES_VERSION} expected.", _HINT)
        entries = plain.get("layers")
        if not isinstance(entries, Mapping) or not all(isinstance(e, Mapping) for e in entries.values()):
            raise ConfigError("choices: 'layers' must map layer names to decisions.", _HINT)
        return cls({str(name): _read(name, entry) for name, entry in entries.items()})

    def only(self, names: Sequence[str] | set[str]) -> Choices:
        """The choices of some layers alone."""
        return Choices({name: choice for name, choice in self.layers.items() if name in names})

    @property
    def factorized(self) -> dict[str, LayerChoice]:
        """The layers that are to be factorized."""
        return {name: choice for name, choice in self.layers.items() if choice.method is not None}

    def same_layers(self, other: Choices) -> bool:
        """Whether both make the same layers of a model, for whatever reasons."""
        own, others = (
            {name: (choice.method, choice.ranks) for name, choice in choices.factorized.items()}
            for choices in (self, other)
        )
        return own == others

    def __iter__(self) -> Iterator[tuple[str, LayerChoice]]:
        return iter(self.layers.items())


def checked(choices: Choices, layers: Sequence[Layer]) -> Choices:
    """The same choices with an entry for every layer of the model, each one checked against it.

    Raises:
        ConfigError: If the model has no layer of that name, or the layer does not support its choice.
    """
    known = {layer.name: layer for layer in layers}
    unknown = [name for name in choices.layers if name not in known]
    if unknown:
        problem = f"choices: layer {unknown[0]!r} is not in the model."
        raise ConfigError(problem, f"Layers: {', '.join(list(known)[:8])}.")
    absent = LayerChoice(reason="not among the choices")
    return Choices({name: _checked(layer, choices.layers.get(name, absent)) for name, layer in known.items()})


def _read(name: str, entry: Mapping[str, Any]) -> LayerChoice:
    if entry.get("decision") not in ("factorized", "dense"):
        problem = f"choices: layer {name!r}: decision {entry.get('decision')!r}."
        raise ConfigError(problem, '"factorized" or "dense".')
    reason = str(entry.get("reason", "the choices say so"))
    if entry["decision"] == "dense":
        return LayerChoice(reason=reason)
    method, ranks = entry.get("method"), entry.get("ranks")
    whole = isinstance(ranks, list | tuple) and ranks and all(type(r) is int for r in ranks)
    if not isinstance(method, str) or not whole:
        raise ConfigError(f"choices: layer {name!r}: method {method!r} with ranks {ranks!r}.", _HINT)
    assert isinstance(ranks, list | tuple)
    return LayerChoice(method, tuple(ranks), reason)


def _checked(layer: Layer, choice: LayerChoice) -> LayerChoice:
    if choice.method is None:
        return choice
    module = layer.module
    if layer.twins and choice.method != TIED_METHOD:
        problem = f"choices: layer {layer.name!r} is tied to {', '.join(layer.twins)}, found method {choice.method!r}."
        raise ConfigError(problem, f"Tied layers run one pair of factors: write {TIED_METHOD!r}.")
    if layer.refusal:
        if getattr(module, "method", None) == choice.method and module.ranks == choice.ranks:
            return LayerChoice(reason=layer.refusal)
        raise ConfigError(
            f"choices: layer {layer.name!r} cannot be factorized: {layer.refusal}.", "merge(model) first."
        )
    assert layer.geometry is not None
    if not METHODS[choice.method].supports(layer.geometry):
        raise ConfigError(f"choices: method {choice.method!r} does not fit layer {layer.name!r} ({layer.kind}).", _HINT)
    explicit(METHODS[choice.method], layer.geometry, choice.ranks, f"choices: layer {layer.name!r}")
    return choice
