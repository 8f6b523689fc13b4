"""Which layers: all of a registered kind, each either open to decomposition or left alone for a stated reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.torch_private import has_gradient_hooks
from ctdr_lightning.decomposition.algorithms.linalg import working
from ctdr_lightning.decomposition.choose import patterns
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.layers.surgery import walk, weigh_inputs
from ctdr_lightning.decomposition.layers.tied import tied_groups
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of, weight_of


@dataclass(frozen=True)
class Layer:
    """A layer that could be decomposed.

    Args:
        name: Dotted name in the model.
        kind: Class of the dense layer ("Conv2d").
        module: The module: dense, or factorized already.
        geometry: Its geometry; None where it cannot be read (lazy layers).
        refusal: The reason why it must stay dense; empty if it may be decomposed.
        calls: Input shapes of one step's calls; None if they were not observed.
        whitening: Cholesky factor (groups, in, in) of the input channels' second moments, where data was given.
        twins: Names of the layers whose weight is the same tensor; they will run this layer's factors.
        owner: Name of the layer whose weight it shares; empty where the weight is its own.
    """

    name: str
    kind: str
    module: nn.Module
    geometry: Geometry | None
    refusal: str = ""
    calls: tuple[tuple[int, ...], ...] | None = None
    whitening: Tensor | None = None
    twins: tuple[str, ...] = ()
    owner: str = ""

    @property
    def weight(self) -> Tensor:
        """Canonical weight (groups, out, in, *kernel), detached."""
        assert self.geometry is not None
        return self.geometry.canonical(weight_of(self.module).detach())

    @property
    def weighted(self) -> Tensor:
        """The canonical weight in double, so scaled that its error is that of the outputs where data was given."""
        weight = working(self.weight)
        return weight if self.whitening is None else weigh_inputs(weight, self.whitening)


def find_layers(model: nn.Module, select: str | Sequence[str] | None = None) -> list[Layer]:
    """List every layer that a method could take, with the reason where one may not.

    Args:
        model: Any module.
        select: Patterns of layer names (``"layer4.*"``, ``"!head"``); None takes all.

    Raises:
        ConfigError: If ``model`` is itself a layer, has no layer to decompose, a pattern means none, or nothing is
            selected.
    """
    if kind_of(model) or isinstance(model, FactorizedLayer):
        raise ConfigError(
            f"model is itself a {type(model).__name__}: it cannot be replaced in place.",
            "Wrap it: nn.Sequential(model).",
        )
    ties = _ties(model)
    layers = [layer for name, module in walk(model) if (layer := _read(name, module, ties)) is not None]
    if not layers:
        raise ConfigError(
            f"model {type(model).__name__} has nothing to decompose.", f"Layers that can be: {', '.join(KINDS)}."
        )
    return _narrow(layers, select)


def _narrow(layers: list[Layer], select: str | Sequence[str] | None) -> list[Layer]:
    if select is None:
        return layers
    wanted = [select] if isinstance(select, str) else select
    if not isinstance(wanted, Sequence):
        raise ConfigError(f"select={select!r} is neither a pattern nor a list of them.", 'Write "layer4.*".')
    if not wanted:
        raise ConfigError("select is empty: no layer would be decomposed.", "Leave it out to take all layers.")
    names = [layer.name for layer in layers]
    patterns.check_used([p.removeprefix("!") if isinstance(p, str) else p for p in wanted], names, "select")
    chosen = [layer for layer in layers if patterns.selected(wanted, layer.name)]
    if not chosen:
        raise ConfigError(f"select={select!r} leaves no layer.", f"Layers: {', '.join(names[:8])}.")
    return chosen


@dataclass(frozen=True)
class _Ties:
    """Weights that occur in a model more than once.

    Args:
        owners: Names of each parameter, by its identity; one module reached by two paths counts once.
        groups: For each layer of a group that can run one pair of factors the group's names, the owner's first.
    """

    owners: dict[int, list[str]]
    groups: dict[nn.Module, tuple[str, ...]]


def _ties(model: nn.Module) -> _Ties:
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[id(parameter)].append(f"{name}.{key}" if name else key)
    groups = {
        module: tuple(name for name, _ in group)
        for group in tied_groups(model)
        if not any(_refuse(layer) for _, layer in group)
        for _, module in group
    }
    return _Ties(owners, groups)


def _read(name: str, module: nn.Module, ties: _Ties) -> Layer | None:
    if isinstance(module, FactorizedLayer):
        kind = module.dense_class.__name__
        return Layer(name, kind, module, module.geometry, f"already factorized by {module.method}")
    refusal = _refused_class(module)
    if refusal:
        return Layer(name, type(module).__name__, module, None, refusal)
    registered = kind_of(module)
    if registered is None:
        return None
    refusal = _refuse(module) or _refuse_tied(name, module, ties)
    first, *others = ties.groups.get(module, ("",))
    if refusal:
        return Layer(name, type(module).__name__, module, None, refusal, owner=first)
    geometry = KINDS[registered].geometry(module)
    return Layer(name, type(module).__name__, module, geometry, twins=tuple(others))


def _refused_class(module: nn.Module) -> str:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and any(
        isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)
    ):
        return "lazy: its shape is not known before the first forward"
    space = type(module).__module__
    if ".ao.nn." in space and any(hasattr(module, name) for name in ("in_features", "in_channels")):
        return "quantised"
    return ""


def _refuse(module: nn.Module) -> str:
    if "weight" not in module._parameters:
        return "parametrized: its weight is computed from other parameters"
    weight = weight_of(module)
    if type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}: decompose before sharding or quantising"
    if weight.is_complex() or not weight.is_floating_point():
        return f"its weight is {weight.dtype}".replace("torch.", "")
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm renormalises rows of the dense table"
    if has_gradient_hooks(weight):
        return "its weight's gradient has a hook, which factors would not have"
    return ""


def _refuse_tied(name: str, module: nn.Module, ties: _Ties) -> str:
    group, places = ties.groups.get(module, ()), ties.owners[id(weight_of(module))]
    if group:
        return "" if group[0] == name else f"tied to {group[0]}, whose factors it runs"
    return f"tied: {' and '.join(places)} are one tensor" if len(places) > 1 else ""


def on_processor(layers: Sequence[Layer]) -> bool:
    """Whether all layers have their weights on the CPU."""
    return all(parameter.device.type == "cpu" for layer in layers for parameter in layer.module.parameters())


def check_finite(layer: Layer) -> None:
    """Refuse weights that no decomposition can be computed of.

    Raises:
        ConfigError: Naming the layer and how many entries are NaN or infinite.
    """
    weight = weight_of(layer.module)
    bad = 0 if weight.is_meta else int((~torch.isfinite(weight)).sum())
    if bad:
        raise ConfigError(
            f"layer {layer.name!r}: {bad} of {weight.numel()} weights are NaN or infinite.",
            "Mend the weights, or leave the layer out with select.",
        )
