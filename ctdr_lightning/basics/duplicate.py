"""A copy of a module whose attributes `copy.deepcopy` refuses: computed weights, stored losses, locks, open files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor, nn

from ctdr_lightning.basics.torch_private import has_gradient_hooks

M = TypeVar("M", bound=nn.Module)


def duplicate(module: M, instead: Mapping[Any, Any] | None = None) -> M:
    """Copy a module deeply.

    Tensors with a graph are copied without it: `weight_norm`, `spectral_norm` and pruning compute a layer's weight from
    its parameters before each forward, so the copy computes its own. Attributes that cannot be copied at all are shared
    with the copy. Hooks on gradients are not copied: one that does nothing tells that there was one.

    Args:
        module: The module.
        instead: By tensor or generator of the module, what the copy has in its place; itself where both share it.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.loss = layer.weight.sum()
        >>> duplicate(layer).loss.requires_grad
        False
    """
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in _tensors(_attributes(module)) if not t.is_leaf}
    memo |= {id(thing): other for thing, other in (instead or {}).items()}
    try:
        copy = deepcopy(module, dict(memo))
    except TypeError:  # how copy and pickle say that they cannot
        copy = deepcopy(module, memo | {id(value): value for value in _attributes(module) if not _can_be_copied(value)})
    for own, copied in zip(module.parameters(), copy.parameters(), strict=True):
        if has_gradient_hooks(own) and copied.requires_grad and not has_gradient_hooks(copied):
            copied.register_hook(_nothing)
    return copy


def _nothing(_gradient: Tensor) -> None:
    return None


def _attributes(module: nn.Module) -> Iterator[Any]:
    for each in module.modules():
        yield from (value for name, value in vars(each).items() if name != "_modules")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    seen: set[int] = set()
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, Mapping) else value)


def _can_be_copied(value: Any) -> bool:
    try:
        deepcopy(value, {id(t): t for t in _tensors([value])})
    except Exception:  # an attribute's own __deepcopy__ may raise anything
        return False
    return True
