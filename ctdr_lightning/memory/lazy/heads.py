"""Linear layers with so many outputs that these are left out while their loss is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctdr_lightning.basics.torch_private import FakeTensor, is_transformed
from ctdr_lightning.memory.lazy.chunked_loss import n_chunks
from ctdr_lightning.memory.lazy.logits import Outcome, logits_of

# With fewer classes the logits are hardly larger than the hidden states of usual widths.
LEAST_CLASSES = 1000


class LazyHeads:
    """Leaves out the outputs of a model's large linear layers until something other than a cross entropy needs them.

    While it is entered, such a layer returns `Logits` in training mode. Losses and gradients are those of the real
    output up to rounding. The forward of a step belongs inside; its backward may run later. An output that is used when
    the weights have changed since is an error, unless `settle` was called before.

    Args:
        model: The model; its layers get an instance attribute ``forward`` and lose it again.
        names: Of the layers; None takes all linear layers of at least ``LEAST_CLASSES`` outputs.

    Attributes:
        outcomes: From the name of each layer that was called to what became of its outputs.

    Example:
        >>> model = nn.Sequential(nn.Embedding(2000, 8), nn.Linear(8, 2000))
        >>> tokens = torch.randint(2000, (4, 300))
        >>> with LazyHeads(model) as heads:
        ...     F.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
        >>> heads.outcomes["1"].chunks, heads.outcomes["1"].asked_by
        (2, '')
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        layers = {name: layer for name, layer in model.named_modules() if _may_be_lazy(layer)}
        self._layers = layers if names is None else {name: layers[name] for name in names if name in layers}
        self.outcomes: dict[str, Outcome] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(self._layers)

    def __enter__(self) -> LazyHeads:
        """Replace the layers' forwards."""
        self.outcomes = {name: Outcome() for name in self._layers}
        for name, layer in self._layers.items():
            vars(layer)["forward"] = _LazyForward(layer, self.outcomes[name])
        return self

    def settle(self) -> None:
        """The forward is over: make the outputs that outlive it, before the weights change."""
        for outcome in self.outcomes.values():
            outcome.settle()

    def __exit__(self, *error: object) -> None:
        """Take the forwards off again."""
        for layer in self._layers.values():
            vars(layer).pop("forward", None)


class _LazyForward:
    """The forward of one layer, put on the instance; a copy of the layer copies this with it."""

    def __init__(self, layer: nn.Linear, outcome: Outcome) -> None:
        self._layer, self._outcome = layer, outcome

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        long = n_chunks(input.numel() // weight.shape[1], weight) > 1
        if long and self._layer.training and _is_plain(input, weight):
            return logits_of(input, weight, bias, self._outcome)
        return F.linear(input, weight, bias)


def _may_be_lazy(layer: nn.Module) -> bool:
    """Whether a layer is a large linear one that runs torch's own forward on a weight that is all here."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        return False
    # a parametrized weight is computed, and may change its state, whenever it is asked for
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return layer.out_features >= LEAST_CLASSES and isinstance(weight, nn.Parameter) and _has_data(weight)


def _has_data(tensor: Any) -> bool:
    """Whether a tensor is no subclass that keeps its data elsewhere, such as a shard."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor) or type(tensor.data) in (Tensor, FakeTensor)


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    """Whether a call is one of ordinary training, with arguments that the layer takes."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    alike = input.dtype == weight.dtype or torch.is_autocast_enabled(input.device.type)
    return (
        _has_data(input)
        and input.is_floating_point()
        and alike
        and input.numel() > 0
        and input.shape[-1] == weight.shape[-1]
        and (input.requires_grad or weight.requires_grad)
    )
