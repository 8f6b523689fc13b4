"""The shapes that reach a model's layers: seen in one forward, or given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.batches import untouched
from ctdr_lightning.decomposition.choose.select import Layer

Shape = tuple[int, ...]


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

    with _hooks(layers, note), untouched(model):
        _call(model, example_input)
    return [replace(layer, calls=tuple(calls[layer.name])) for layer in layers]


def with_given_shapes(layers: Sequence[Layer], shapes: Mapping[str, Sequence[int]]) -> list[Layer]:
    """Take input shapes as given, by layer name; layers without one are taken as never called.

    Raises:
        ConfigError: If a name is not a layer's.
    """
    unknown = set(shapes) - {layer.name for layer in layers}
    if unknown:
        raise ConfigError(f"input_shapes: {min(unknown)!r} is not a layer.", "Name layers as the report does.")
    return [replace(layer, calls=(tuple(shapes[n]),) if (n := layer.name) in shapes else ()) for layer in layers]


@contextmanager
def _hooks(layers: Sequence[Layer], note: Callable[[str, Tensor], None]) -> Iterator[None]:
    def hook(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(name, args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as hooks:
        for layer in layers:
            own = partial(hook, layer.name)
            hooks.enter_context(layer.module.register_forward_pre_hook(own, with_kwargs=True))
        yield


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, tuple | list):
        model(*inputs)
    else:
        model(inputs)
