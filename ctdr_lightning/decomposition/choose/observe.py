"""Run a model and look at what reaches its layers: shapes, and where asked the covariance of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.algorithms.linalg import working
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.shapes.geometry import Geometry

Shape = tuple[int, ...]
_REGULARIZATION = 1e-3


def with_shapes(model: nn.Module, layers: Sequence[Layer], example_input: Any) -> list[Layer]:
    """Note the input shapes of one forward; buffers, random state and mode are left as they were.

    Args:
        model: The model.
        layers: Its layers.
        example_input: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.
    """
    calls: dict[str, list[Shape]] = {layer.name: [] for layer in layers}

    def note(name: str, x: Tensor) -> None:
        calls[name].append(tuple(x.shape))

    with _hooks(layers, note), _untouched(model):
        _call(model, example_input)
    return [replace(layer, calls=tuple(calls[layer.name])) for layer in layers]


def with_given_shapes(layers: Sequence[Layer], shapes: Mapping[str, Sequence[int]]) -> list[Layer]:
    """Take input shapes as given, by layer name; layers without one are taken as never called.

    Raises:
        ConfigError: When a name is not a layer's.
    """
    unknown = set(shapes) - {layer.name for layer in layers}
    if unknown:
        raise ConfigError(f"input_shapes: {min(unknown)!r} is not a layer.", "Name layers as the report does.")
    return [replace(layer, calls=(tuple(shapes[n]),) if (n := layer.name) in shapes else ()) for layer in layers]


def with_whitening(model: nn.Module, layers: Sequence[Layer], data: Iterable[Any], n_batches: int) -> list[Layer]:
    """Give each layer the Cholesky factor of its input channels' second moments over a few batches.

    Args:
        model: The model, run in evaluation mode without gradients.
        layers: Its layers.
        data: Batches: tensors, mappings of keyword arguments, or tuples whose first entry is the input.
        n_batches: How many are used.

    Raises:
        ConfigError: When there is no batch.
    """
    moments: dict[str, Tensor] = {}
    geometries = {layer.name: layer.geometry for layer in layers}

    def note(name: str, x: Tensor) -> None:
        geometry = geometries[name]
        if geometry is not None and not geometry.lookup:
            moments[name] = moments.get(name, 0) + second_moments(geometry, x)

    n_seen = 0
    with _hooks(layers, note), _untouched(model, training=False):
        for batch in islice(data, n_batches):
            _call(model, (batch[0],) if isinstance(batch, list | tuple) else batch)
            n_seen += 1
    if not n_seen:
        raise ConfigError("data has no batch.", "Give a data loader, or a list of batches.")
    found = {name: whitening(moment) for name, moment in moments.items()}
    return [replace(layer, whitening=found.get(layer.name)) for layer in layers]


def second_moments(geometry: Geometry, x: Tensor) -> Tensor:
    """Sum of x x^T over all positions, shape (groups, in, in), for a layer's input."""
    channels = x.movedim(-1 - geometry.n_axes, -1).reshape(-1, geometry.groups, geometry.group_shape[1])
    return torch.einsum("ngi,ngj->gij", channels, channels).to(working(x.new_empty(0)).dtype)


def whitening(moments: Tensor) -> Tensor:
    """Cholesky factor L (groups, in, in) of regularised second moments: ||W L|| measures the outputs' change."""
    top = torch.linalg.eigvalsh(moments)[:, -1].clamp_min(1e-30)
    eye = torch.eye(moments.shape[-1]).to(moments)
    return torch.linalg.cholesky(moments / top[:, None, None] + _REGULARIZATION * eye)


@contextmanager
def _hooks(layers: Sequence[Layer], note: Callable[[str, Tensor], None]) -> Iterator[None]:
    def hook(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(name, args[0] if args else next(iter(kwargs.values())))

    handles = [layer.module.register_forward_pre_hook(partial(hook, layer.name), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _untouched(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Run without gradients; put modes, buffers and random state back afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            if training is not None:
                model.train(training)
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, tuple | list):
        model(*inputs)
    else:
        model(inputs)
