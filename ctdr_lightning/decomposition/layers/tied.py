"""Layers whose weights are one tensor: one of them is factorized, the others run its factors.

GPT-2 and BERT use one matrix as embedding and as head, T5 uses it three times. Press and Wolf, EACL 2017, arXiv
1608.05859. The first layer of such a group *owns* the weight ``P = L R`` (rows x rank, rank x columns); every other one
becomes a :class:`TiedLayer` that holds no weight and computes with ``L`` and ``R``, transposed where it reads ``P`` the
other way round. So the group stays one tensor: one gradient, one optimizer state, one entry in a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of, weight_of

TIED_METHOD = "svd"  # two factors of one matrix, which both a linear layer and an embedding can run
_SHAREABLE = ("linear", "embedding")
_OWN = set(vars(nn.Module()))


class TiedLayer(nn.Module):
    """A linear layer or an embedding that runs the factors of the layer that its weight was tied to.

    Args:
        dense: The layer to replace; its bias is taken over.
        owner: The factorized layer that holds the weight.
    """

    def __init__(self, dense: nn.Module, owner: FactorizedLayer) -> None:
        super().__init__()
        self.dense_class = type(dense)
        self.dense_attributes = {name: value for name, value in vars(dense).items() if name not in _OWN}
        vars(self).update(self.dense_attributes)
        self.bias = getattr(dense, "bias", None)
        self._owner = (owner,)  # in a tuple: as a child it would be in the state dict twice
        self.train(dense.training)

    def follow(self, owner: FactorizedLayer) -> TiedLayer:
        """The same layer with the factors of another owner."""
        new = TiedLayer.__new__(TiedLayer)
        nn.Module.__init__(new)
        vars(new).update({name: value for name, value in vars(self).items() if name not in _OWN})
        new.bias, new._owner = self.bias, (owner,)
        return new.train(self.training)

    @property
    def owner(self) -> FactorizedLayer:
        """The layer that holds the factors."""
        return self._owner[0]

    @property
    def weight(self) -> Tensor:
        """The dense weight that the factors represent, differentiable."""
        return self.owner.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run the factors; shapes as the dense layer's."""
        left, right = factors_of(self.owner)
        if issubclass(self.dense_class, nn.Embedding):
            return F.linear(F.embedding(x, left, cast(Any, self.padding_idx)), right.T)
        return F.linear(F.linear(x, right), left, cast("Tensor | None", self.bias))

    def to_dense(self, weight: nn.Parameter) -> nn.Module:
        """The dense layer again.

        Args:
            weight: The owner's dense weight, which becomes this layer's own as well.
        """
        dense: Any = self.dense_class.__new__(self.dense_class)
        nn.Module.__init__(dense)
        vars(dense).update(self.dense_attributes)
        dense.weight = weight
        if not issubclass(self.dense_class, nn.Embedding):
            dense.bias = self.bias
        return dense.train(self.training)

    def extra_repr(self) -> str:
        """Dense class and ranks."""
        return f"{self.dense_class.__name__} by the factors of its twin, ranks={list(self.owner.ranks)}"


def factors_of(owner: FactorizedLayer) -> tuple[Tensor, Tensor]:
    """The factors (rows, rank) and (rank, columns) whose product is the owner's dense weight, differentiable."""
    pairs = zip(owner.factor_geometries, owner.factor_layers, strict=True)
    first, second = (geometry.canonical(weight_of(layer))[0] for geometry, layer in pairs)
    return (first.T, second.T) if owner.geometry.flipped else (second, first)


def tied_groups(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Layers with one weight among them that can run one pair of factors.

    Returns:
        For each such weight the names and modules that use it, in the model's order, the owner first. A weight that
        anything else uses as well is not among them.
    """
    uses: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            uses[id(parameter)].append((name, module, key))
    groups = []
    for group in uses.values():
        plain = all(key == "weight" and kind_of(module) in _SHAREABLE for _, module, key in group)
        if len(group) > 1 and plain and len({_rows(module) for _, module, _ in group}) == 1:
            groups.append([(name, module) for name, module, _ in group])
    return groups


def _rows(module: nn.Module) -> int:
    kind = kind_of(module)
    assert kind is not None
    geometry = KINDS[kind].geometry(module)
    return geometry.in_size if geometry.flipped else geometry.out_size


def follow_owners(model: nn.Module, swaps: dict[nn.Module, nn.Module]) -> dict[nn.Module, nn.Module]:
    """Replacements of the layers that are tied to those about to be replaced.

    Args:
        model: The model before anything is replaced.
        swaps: Layers, dense or factorized, and their factorized forms.

    Returns:
        Each layer tied to one of them, and the layer that runs its new factors.
    """
    found: dict[nn.Module, nn.Module] = {}
    for (_, first), *others in tied_groups(model):
        owner = swaps.get(first)
        if isinstance(owner, FactorizedLayer):
            found |= {layer: TiedLayer(layer, owner) for _, layer in others}
    for layer in model.modules():
        owner = swaps.get(layer.owner) if isinstance(layer, TiedLayer) else None
        if isinstance(layer, TiedLayer) and isinstance(owner, FactorizedLayer):
            found[layer] = layer.follow(owner)
    return found
