"""Objects that a training step can reach from module, batch and optimizers: tensors, containers, generators.

Attributes are followed through modules, optimizers, objects of the user's own classes, and the containers of Python.
Objects of torch, Lightning and the standard library are not looked into. Globals and closures are out of reach.
"""

from __future__ import annotations

import io
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# A vocabulary or a list of samples on the module: a look at each entry before every step takes longer than many a step
# (its time was not measured).
MOST_ENTRIES = 10_000
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}
_FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "ctdr_lightning", *sys.stdlib_module_names}
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_WORDS = (str, int)
NOTHING_INSIDE = frozenset({int, float, bool, str, bytes, type(None)})
Trail = tuple[Any, Any]


@dataclass
class Reachable:
    """The reachable objects, each once.

    Attributes:
        tensors: Tensors and the ways to them.
        containers: Dictionaries, lists, deques and sets, attributes of objects among them, with a copy of each.
        slots: Objects without a dictionary, with the contents of their slots.
        generators: Random generators.
        arrays: NumPy arrays.
        iterators: Iterators, which go on when they are asked and cannot be taken back.
        too_large: Ways to containers of so many entries that they were not looked into.
    """

    tensors: list[tuple[Trail, Tensor]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    slots: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    arrays: list[tuple[Trail, np.ndarray]] = field(default_factory=list)
    iterators: list[tuple[Trail, Any]] = field(default_factory=list)
    too_large: list[Trail] = field(default_factory=list)


_Todo = list[tuple[Trail, Any]]
_Visit = Callable[[Reachable, _Todo, Trail, Any], None]


def reachable(roots: Mapping[str, Any]) -> Reachable:
    """Follow everything that can be reached.

    Args:
        roots: Where to start, by name; names are the beginnings of the ways that messages quote.

    Example:
        >>> queue = nn.Linear(2, 2)
        >>> queue.seen = [torch.zeros(3)]
        >>> [way(trail) for trail, _ in reachable({"net": queue}).tensors if "seen" in way(trail)]
        ['net.seen[0]']
    """
    found, seen = Reachable(), set()
    todo: _Todo = [((None, name), thing) for name, thing in reversed(list(roots.items()))]
    while todo:
        trail, thing = todo.pop()
        kind: Any = type(thing)
        visit = _visitor(kind)
        if visit is not None and id(thing) not in seen:
            seen.add(id(thing))
            visit(found, todo, trail, thing)
    return found


def way(trail: Trail) -> str:
    """A trail in words: ``net.queue[0]``."""
    parts: list[str] = []
    step: Any = trail
    while step is not None:
        step, key = step
        if not (isinstance(key, str) and key in ("_parameters", "_buffers", "_modules")):
            parts.append(key if isinstance(key, str) else f"[{_shown(key)}]")
    return ".".join(reversed(parts)).replace(".[", "[")


def mark(trail: Trail) -> tuple[Hashable, ...]:
    """A trail as a key for another step: it keeps nothing alive, and costs a tenth of the words."""
    keys: list[Hashable] = []
    step: Any = trail
    while step is not None:
        step, key = step
        keys.append(key if isinstance(key, _WORDS) else id(key))
    return tuple(keys)


def _shown(key: Any) -> str:
    # An optimizer's state is kept by parameter; to write out a tensor's values takes milliseconds.
    return f"{type(key).__name__} of {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)


def iterator_state(thing: Any) -> list[Any]:
    """Position of an iterator, if it has one to show; else a new object each time.

    Returns:
        A list, to be compared by the identity of its entries: attributes that were freed lend their ``id`` to others.
    """
    if hasattr(thing, "__dict__"):
        return list(vars(thing).values())
    left = operator.length_hint(thing, -1)
    return [left if left >= 0 else object()]


@cache
def _visitor(kind: Any) -> _Visit | None:
    if issubclass(kind, Tensor):
        return _tensor
    if issubclass(kind, nn.Module):
        return _module
    if issubclass(kind, _GENERATORS):
        return _generator
    if issubclass(kind, np.ndarray):
        return _array
    return _container_visitor(kind) or _object_visitor(kind)


def _container_visitor(kind: type) -> _Visit | None:
    if issubclass(kind, MutableMapping | list | deque | set):
        return _container
    return _tuple if issubclass(kind, tuple) else None


def _object_visitor(kind: type) -> _Visit | None:
    own = kind.__module__.partition(".")[0] not in _FOREIGN or issubclass(kind, torch.optim.Optimizer)
    if issubclass(kind, io.IOBase | type):
        return None
    if own and kind.__dictoffset__:
        return _object
    if own and any(vars(base).get("__slots__") for base in kind.__mro__):
        return _slotted
    return _iterator if issubclass(kind, Iterator) else None


def _tensor(found: Reachable, todo: _Todo, trail: Trail, thing: Tensor) -> None:
    if not thing.is_meta:
        found.tensors.append((trail, thing))


def _module(found: Reachable, todo: _Todo, trail: Trail, thing: nn.Module) -> None:
    attributes = vars(thing)
    found.containers.append((attributes, attributes.copy()))
    todo += [
        ((trail, key), value)
        for key, value in attributes.items()
        if key not in _BOOKKEEPING and type(value) not in NOTHING_INSIDE
    ]


def _generator(found: Reachable, todo: _Todo, trail: Trail, thing: Any) -> None:
    found.generators.append(thing)


def _array(found: Reachable, todo: _Todo, trail: Trail, thing: np.ndarray) -> None:
    found.arrays.append((trail, thing))


def _container(found: Reachable, todo: _Todo, trail: Trail, thing: Any) -> None:
    if len(thing) > MOST_ENTRIES:
        found.too_large.append(trail)
        return
    is_map = type(thing) is dict or isinstance(thing, MutableMapping)
    copied: Any = dict(thing) if is_map else list(thing)
    found.containers.append((thing, copied))
    entries = copied.items() if is_map else enumerate(copied)
    todo += [((trail, key), value) for key, value in entries if type(value) not in NOTHING_INSIDE]


def _tuple(found: Reachable, todo: _Todo, trail: Trail, thing: tuple[Any, ...]) -> None:
    todo += [((trail, index), value) for index, value in enumerate(thing[:MOST_ENTRIES])]


def _object(found: Reachable, todo: _Todo, trail: Trail, thing: Any) -> None:
    attributes = vars(thing)
    if isinstance(attributes, dict):
        found.containers.append((attributes, attributes.copy()))
        todo += [((trail, key), value) for key, value in attributes.items()]


def _slotted(found: Reachable, todo: _Todo, trail: Trail, thing: Any) -> None:
    names = [name for base in type(thing).__mro__ for name in vars(base).get("__slots__", ())]
    contents = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    found.slots.append((thing, contents))
    todo += [((trail, key), value) for key, value in contents.items()]


def _iterator(found: Reachable, todo: _Todo, trail: Trail, thing: Any) -> None:
    found.iterators.append((trail, thing))
