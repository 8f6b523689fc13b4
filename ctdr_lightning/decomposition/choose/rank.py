"""Rules for the rank of a layer: one registered rule for each notation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch import Tensor

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.decomposition.algorithms.solvers import SOLVERS
from ctdr_lightning.decomposition.methods import Candidate, KeepDenseError, Method, Ranks
from ctdr_lightning.decomposition.shapes.geometry import Geometry

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*")
RankLike = float | int | str | Sequence[int]


@dataclass(frozen=True)
class Rule:
    """A way to choose ranks.

    Args:
        choose: (method, geometry, canonical weight, value, multiple) to a candidate; raises KeepDenseError.
        best: Quantity that ``method="auto"`` minimises over methods: "error", "parameters", or None for the natural
            method.
        takes: Description of valid values, for errors; None if there is none.
        check: Whether a value is allowed.
    """

    choose: Callable[[Method, Geometry, Tensor, float, int], Candidate]
    best: str | None
    takes: str | None
    check: Callable[[float], bool]


RANK_RULES: Registry[Rule] = Registry("rank rule", group="ctdr_lightning.rank_rules")


@dataclass(frozen=True)
class RankSpec:
    """A rank argument, read: a rule's name and value, or explicit ranks."""

    rule: str
    value: float = math.nan
    ranks: Ranks = ()

    @classmethod
    def parse(cls, rank: RankLike, name: str = "rank") -> RankSpec:
        """Read ``0.5``, ``16``, ``(8, 16)``, ``"vbmf"`` or ``"error=0.05"``.

        Raises:
            ConfigError: If it has another form or its value is out of range.
        """
        if isinstance(rank, str):
            return _parse_text(rank, name)
        if isinstance(rank, float):
            return _checked("share", rank, name)
        ranks: tuple[Any, ...] = tuple(rank) if isinstance(rank, Sequence) else (rank,)
        if not ranks or not all(type(r) is int and r >= 1 for r in ranks):
            raise ConfigError(
                f"{name}={rank!r} is not a rank.",
                'Write a share in (0, 1] such as 0.5, a whole number from 1, "vbmf" or "error=0.05".',
            )
        return cls("fixed", ranks=() if isinstance(rank, int) else ranks, value=float(ranks[0]))


def _parse_text(text: str, name: str) -> RankSpec:
    rule, _, value = (part.strip() for part in text.partition("="))
    if number := _NUMBER.fullmatch(text):
        meant = float(number[1]) / (100 if number[2] else 1)
        raise ConfigError(f"{name}={text!r} is text.", f"Write the number: {name}={meant:g}.")
    takes = RANK_RULES[rule].takes
    try:
        return _checked(rule, float(value) if value else math.nan, name)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}={text!r}: {value!r} is not a number.", f"{rule} takes {takes}.") from None


def _checked(rule: str, value: float, name: str) -> RankSpec:
    if not RANK_RULES[rule].check(value):
        shown = rule if math.isnan(value) else value
        raise ConfigError(f"{name}={shown!r} is out of range.", f"{rule} takes {RANK_RULES[rule].takes}.")
    return RankSpec(rule, value)


def round_ranks(ranks: Ranks, multiple: int) -> Ranks:
    """Round down to a multiple, at least one multiple."""
    return tuple(max(rank // multiple * multiple, multiple) for rank in ranks)


def _share(method: Method, geometry: Geometry, weight: Tensor, share: float, multiple: int) -> Candidate:
    return method.within(geometry, weight, int(share * geometry.n_weights), multiple)


def _error(method: Method, geometry: Geometry, weight: Tensor, bound: float, multiple: int) -> Candidate:
    return method.reaching(geometry, weight, bound, multiple)


def _energy(method: Method, geometry: Geometry, weight: Tensor, kept: float, multiple: int) -> Candidate:
    return method.reaching(geometry, weight, math.sqrt(1 - kept), multiple)


def _vbmf(method: Method, geometry: Geometry, weight: Tensor, strength: float, multiple: int) -> Candidate:
    strength = 1.0 if math.isnan(strength) else strength
    found = tuple(max(group) for group in zip(*(method.vbmf(part) for part in weight), strict=True))
    if min(found) < 1:
        raise KeepDenseError("EVBMF finds only noise in the weights: they look untrained")
    most = method.max_ranks(geometry)
    weakened = tuple(round(top - strength * (top - rank)) for rank, top in zip(found, most, strict=True))
    return method.at(geometry, method.feasible(geometry, round_ranks(weakened, multiple)))


def _fixed(method: Method, geometry: Geometry, weight: Tensor, rank: float, multiple: int) -> Candidate:
    return method.at(geometry, method.uniform(geometry, *round_ranks((int(rank),), multiple)))


def _in_unit(value: float) -> bool:
    return 0 < value <= 1


RANK_RULES.register("share")(Rule(_share, "error", "the share of parameters to keep, in (0, 1]", _in_unit))
RANK_RULES.register("error")(Rule(_error, "parameters", "a relative error in (0, 1): error=0.05", lambda v: 0 < v < 1))
RANK_RULES.register("energy")(Rule(_energy, "parameters", "the energy to keep, in (0, 1]: energy=0.99", _in_unit))
RANK_RULES.register("vbmf")(
    Rule(_vbmf, None, "nothing, or a strength in (0, 1]: vbmf=0.8", lambda v: math.isnan(v) or 0 < v <= 1)
)
RANK_RULES.register("fixed")(Rule(_fixed, None, "a whole number from 1", lambda v: v >= 1))


def explicit(method: Method, geometry: Geometry, ranks: Ranks, name: str) -> Candidate:
    """A candidate with exactly these ranks.

    Raises:
        ConfigError: If their number is wrong or one is above its mode.
    """
    most = method.max_ranks(geometry)
    if len(ranks) != len(most):
        raise ConfigError(f"{name}: {method.name} has {len(most)} ranks here, found {list(ranks)}.", "Give them all.")
    if min(ranks) < 1 or method.feasible(geometry, ranks) != ranks:
        problem = f"{name}: {method.name} ranks {list(ranks)} are not in 1..{list(most)}"
        raise ConfigError(f"{problem} or above the limit of their neighbours.", "Lower them, or leave the layer out.")
    return method.at(geometry, ranks)


def ranked(
    spec: RankSpec, methods: Sequence[Method], geometry: Geometry, weight: Tensor, multiple: int
) -> list[Candidate]:
    """A candidate a method, best first: least error at equal cost, or least cost at equal error.

    Args:
        spec: The rank argument, not explicit ranks.
        methods: At least one; the first is the natural one.
        geometry: The layer's geometry.
        weight: Canonical weight (groups, out, in, *kernel), in the precision to compute in.
        multiple: Ranks are rounded to multiples of it.

    Raises:
        KeepDenseError: If no method offers a candidate.
    """
    rule = RANK_RULES[spec.rule]
    found: list[Candidate] = []
    reasons: list[str] = []
    for method in methods if rule.best else methods[:1]:
        try:
            found.append(rule.choose(method, geometry, weight, spec.value, multiple))
        except KeepDenseError as reason:
            reasons.append(str(reason))
    if not found:
        raise KeepDenseError(reasons[0])
    if len(found) > 1:
        found = [measured(candidate, geometry, weight) for candidate in found]
    return sorted(found, key=attrgetter(rule.best)) if rule.best else found


def measured(candidate: Candidate, geometry: Geometry, weight: Tensor) -> Candidate:
    """The candidate with its error known, by solving it where its rule did not look."""
    if not math.isnan(candidate.error):
        return candidate
    method, single = candidate.method, weight.float()
    factors = method.factorize(geometry, single, candidate.ranks, SOLVERS["gram"])
    lost = single - method.compose(geometry, candidate.ranks, factors)
    return replace(candidate, error=float(lost.norm() / single.norm().clamp_min(1e-30)))
