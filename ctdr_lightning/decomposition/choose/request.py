"""The user's request: ranks and methods by pattern, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose import patterns
from ctdr_lightning.decomposition.choose.allocate import RESOURCES
from ctdr_lightning.decomposition.choose.costs import CostModel
from ctdr_lightning.decomposition.choose.rank import RankLike, RankSpec
from ctdr_lightning.decomposition.choose.select import Layer, check_finite
from ctdr_lightning.decomposition.layers.tied import TIED_METHOD
from ctdr_lightning.decomposition.methods import METHODS, KeepDenseError, Method, method_for
from ctdr_lightning.decomposition.shapes.geometry import Geometry

MethodLike = str | Sequence[str]
AUTO = ("tucker", "spatial", "svd")


@dataclass(frozen=True)
class Request:
    """The user's request, read and checked.

    Args:
        specs: Rank by pattern.
        methods: Method names by pattern.
        allocate: Resource of which one share is spent over all layers; None gives every layer the same share.
        multiple: Ranks are rounded to multiples of it.
        costs: Cost model of memory and time.
        progress: Whether to show a progress bar.
    """

    specs: Mapping[str, RankSpec]
    methods: Mapping[str, tuple[str, ...]]
    allocate: str | None
    multiple: int
    costs: CostModel
    progress: bool = True

    @classmethod
    def read(
        cls,
        names: Sequence[str],
        rank: RankLike | Mapping[str, RankLike],
        method: MethodLike | Mapping[str, MethodLike],
        allocate: str | None,
        multiple: int,
        costs: CostModel,
        progress: bool = True,
    ) -> Request:
        """Read the arguments of `decompose`; ``names`` are the layers that patterns may mean.

        Raises:
            ConfigError: For a rank, method, resource, multiple or pattern that cannot be used.
        """
        if type(multiple) is not int or multiple < 1:
            raise ConfigError(f"multiple={multiple!r} is not a whole number from 1.", "Write 8 for tensor cores.")
        if allocate is not None:
            RESOURCES[allocate]
            if not isinstance(rank, float):
                raise ConfigError(f"allocate takes one share for all layers, found rank={rank!r}.", "Write rank=0.25.")
        return cls(_specs(rank, names), _methods(method, names), allocate, multiple, costs, progress)

    def methods_for(self, layer: Layer) -> list[Method]:
        """The methods that may be used on a layer, the natural one first."""
        assert layer.geometry is not None
        if layer.twins:
            return candidates((TIED_METHOD,), layer.geometry)
        return candidates(patterns.lookup(self.methods, layer.name, "method") or ("auto",), layer.geometry)


def _specs(rank: RankLike | Mapping[str, RankLike], names: Sequence[str]) -> dict[str, RankSpec]:
    given = rank if isinstance(rank, Mapping) else {"*": rank}
    if not given:
        raise ConfigError("rank is an empty mapping: no layer would be decomposed.", 'Write {"*": 0.5}.')
    specs = {p: RankSpec.parse(r, f"rank[{p!r}]" if isinstance(rank, Mapping) else "rank") for p, r in given.items()}
    patterns.check_used(specs, names, "rank")
    return specs


def _methods(method: MethodLike | Mapping[str, MethodLike], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    given = method if isinstance(method, Mapping) else {"*": method}
    if isinstance(method, Mapping):
        patterns.check_used(given, names, "method")
    wanted = {p: (value,) if isinstance(value, str) else value for p, value in given.items()}
    named = [isinstance(v, Sequence) and v and all(isinstance(name, str) for name in v) for v in wanted.values()]
    if not wanted or not all(named):
        raise ConfigError(f"method={method!r} names no method.", f"Valid names: auto, {', '.join(METHODS)}.")
    for name in (name for value in wanted.values() for name in value if name != "auto"):
        METHODS[name]
    return {pattern: tuple(value) for pattern, value in wanted.items()}


def candidates(names: Sequence[str], geometry: Geometry) -> list[Method]:
    """The methods that these names mean for such a layer, the natural one first."""
    depthwise = geometry.group_shape[1] == 1 and geometry.groups > 1
    wanted = [name for given in names for name in (AUTO if given == "auto" else (given,))]
    if depthwise:  # only a split of the kernel is left, and that must be asked for: on trained nets it loses much
        wanted = [name for name in names if name == "spatial"]
    return list(dict.fromkeys(method_for(name, geometry) for name in wanted))


def check_reachable(layers: Sequence[Layer], request: Request) -> None:
    """Refuse a whole number above every mode of every layer it is meant for: nothing would be decomposed."""
    wanted = [(layer, patterns.lookup(request.specs, layer.name, "rank")) for layer in layers if not layer.refusal]
    for spec in {spec for _, spec in wanted if spec and spec.rule == "fixed" and not spec.ranks}:
        meant = [layer for layer, own in wanted if own == spec]
        most = max(
            (max(m.max_ranks(g)) for x in meant if (g := x.geometry) for m in request.methods_for(x)),
            default=spec.value,
        )
        if spec.value > most:
            raise ConfigError(
                f"rank={int(spec.value)} is above the largest rank, {most:.0f}, of every layer it is for.",
                "Lower it, or give a share such as 0.5.",
            )


def rank_for(layer: Layer, request: Request) -> RankSpec:
    """The rank requested for a layer that may be decomposed.

    Raises:
        KeepDenseError: If it may not, or no rank is requested.
    """
    if layer.refusal:
        raise KeepDenseError(layer.refusal)
    spec = patterns.lookup(request.specs, layer.name, "rank")
    if spec is None:
        raise KeepDenseError("no rank is given for it")
    check_finite(layer)
    if not request.methods_for(layer):
        raise KeepDenseError('depthwise: one channel a group leaves nothing to share (method="spatial" splits it)')
    return spec
