"""Nests of tensors, as batches are: of dicts, lists and tuples, and of what torch's own functions take for leaves.

Those are other mappings, such as the ``BatchEncoding`` of a tokenizer, and dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ctdr_lightning.basics.torch_private import tree_flatten, tree_leaves, tree_map

IsLeaf = Callable[[Any], bool]


def map_leaves(function: Callable[[Any], Any], nest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """A nest of the same classes with other leaves.

    Args:
        function: From a leaf to the one in its place.
        nest: It is not changed.
        is_leaf: Whether a node is a leaf, whatever it holds.

    Example:
        >>> from collections import UserDict
        >>> map_leaves(abs, UserDict(a=-1, b=[-2, 3]))
        {'a': 1, 'b': [2, 3]}
    """

    def mapped(leaf: Any) -> Any:
        entries = _entries(leaf, is_leaf)
        if entries is None:
            return function(leaf)
        return _with(leaf, {key: map_leaves(function, entry, is_leaf) for key, entry in entries.items()})

    return tree_map(mapped, nest, is_leaf=is_leaf)


def leaves_of(nest: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of a nest, depth first.

    Example:
        >>> from collections import UserDict
        >>> leaves_of((1, UserDict(a=2, b=[3])))
        [1, 2, 3]
    """
    found: list[Any] = []
    for leaf in tree_leaves(nest, is_leaf=is_leaf):
        entries = _entries(leaf, is_leaf)
        found += [leaf] if entries is None else leaves_of(list(entries.values()), is_leaf)
    return found


def outline_of(nest: Any) -> Hashable:
    """The structure of a nest: two with the same one differ in their leaves alone.

    Example:
        >>> outline_of([1, {"a": 2}]) == outline_of([5, {"a": 6}]) != outline_of([1, {"b": 2}])
        True
    """
    leaves, spec = tree_flatten(nest)
    opened = [(index, leaf, _entries(leaf, None)) for index, leaf in enumerate(leaves)]
    inner = tuple(
        (index, type(leaf).__name__, tuple(entries), outline_of(list(entries.values())))
        for index, leaf, entries in opened
        if entries is not None
    )
    return (str(spec), inner) if inner else str(spec)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a nested batch, depth first; plain objects are looked into."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from (tensor for item in batch.values() for tensor in tensors_of(item))
    elif isinstance(batch, list | tuple):
        yield from (tensor for item in batch for tensor in tensors_of(item))
    elif hasattr(batch, "__dict__"):
        yield from tensors_of(vars(batch))


def _entries(node: Any, is_leaf: IsLeaf | None) -> dict[Any, Any] | None:
    """The entries of a node that torch takes for a leaf; None where it is one."""
    if is_leaf is not None and is_leaf(node):
        return None
    if isinstance(node, MutableMapping):
        return dict(node)
    if is_dataclass(node) and not isinstance(node, type):
        return {each.name: getattr(node, each.name) for each in fields(node)}
    return None


def _with(node: Any, entries: dict[Any, Any]) -> Any:
    made = copy(node)
    for key, entry in entries.items():
        if isinstance(made, MutableMapping):
            made[key] = entry
        else:
            object.__setattr__(made, key, entry)  # a frozen dataclass has no other way
    return made
