"""The part of a step's reach that persists between steps: walked once, then only compared.

A walk through ResNet-50 and its optimizer takes 2.6 ms, and one copy a buffer is 161 launches on a GPU. Between two
steps the same objects are there nearly always: a comparison of the containers' entries shows it, object
by object, in C. If a number or a text has another value, only its container is copied again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.torch_private import foreach_copy_
from ctdr_lightning.memory.holders.optimizer_state import updates_one_by_one
from ctdr_lightning.memory.values.tensors import own_part
from ctdr_lightning.trainer.training_step.retry.reachable import NOTHING_INSIDE, Reachable, Trail, reachable

# No more than this remains between steps: an optimizer's step may need the memory.
KEPT_AT_MOST_BYTES = 4 * 2**20
# A metric's counts: a module that has one would be walked anew before each step, for 5 % of one of 70 ms.
NEGLIGIBLE_BYTES = 2048
T = TypeVar("T")


class Standing:
    """Objects that can be reached from the module and the optimizers, as of the last step.

    Only modules, their parameters and buffers, the state of torch's optimizers and its containers, and negligible
    tensors without a graph are kept alive: if a walk finds other tensors, it is repeated before each step. An optimizer
    of somebody else's may put new tensors in the place of its state, as GaLore does; the old ones are to be freed then.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._found: Reachable | None = None
        self._roots: list[Any] = []
        self._made: dict[Hashable, Any] = {}
        self._own = False
        self._changing: list[int] = []
        self._maps: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._others: list[int] = []
        self._still: list[int] = []
        self._held: list[Any] = []
        self._lengths: list[int] = []
        self.copies = StandingCopies()

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """A result derived from the tensors and their paths; made again if these have changed."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def reach(self, roots: Mapping[str, Any]) -> Reachable:
        """Objects that can be reached now.

        Args:
            roots: By name, as for `reachable`.
        """
        given = [thing for root in roots.values() for thing in (root if isinstance(root, list) else [root])]
        if self._found is not None and _same(given, self._roots) and self._compare():
            return self._found
        self._found, self._roots, self._made = reachable(roots), given, {}
        kept = all(updates_one_by_one(thing) for thing in given if isinstance(thing, torch.optim.Optimizer))
        self._own = kept and all(_stays(trail, tensor) for trail, tensor in self._found.tensors)
        self._changing = []
        self._note()
        return self._found

    def release(self) -> None:
        """The step is over: release everything that may be freed before the next one."""
        if not self._own:
            self._forget()
        self.copies.release()

    def _note(self) -> None:
        """List the entries of the containers, without those that change from step to step."""
        assert self._found is not None
        containers = self._found.containers
        changing = set(self._changing)
        still = [i for i, (thing, _) in enumerate(containers) if i not in changing and isinstance(thing, dict | list)]
        self._maps = [containers[i][0] for i in still if isinstance(containers[i][0], dict)]
        self._lists = [containers[i][0] for i in still if isinstance(containers[i][0], list)]
        self._others = [i for i in range(len(containers)) if i in changing or i not in set(still)]
        self._still = still
        self._held, self._lengths = self._contents()

    def _contents(self) -> tuple[list[Any], list[int]]:
        maps, lists = self._maps, self._lists
        held = [*chain.from_iterable(maps), *chain.from_iterable(map(dict.values, maps)), *chain.from_iterable(lists)]
        return held, [*map(len, maps), *map(len, lists)]

    def _compare(self) -> bool:
        """Whether the walk would find the same; numbers and texts that have other values are noted."""
        assert self._found is not None
        if not all(self._update(i) for i in self._others) or not self._slots_stand():
            return False
        held, lengths = self._contents()
        if lengths != self._lengths or len(held) != len(self._held):
            return False
        if not all(map(operator.is_, held, self._held)):
            containers = self._found.containers
            differing = [i for i in self._still if not _same_contents(*containers[i])]
            if not all(self._update(i) for i in differing):
                return False
            self._changing += differing
            self._note()
        return True

    def _update(self, index: int) -> bool:
        """Copy a container anew; False where it holds other objects than before, which may hold tensors."""
        assert self._found is not None
        thing, before = self._found.containers[index]
        if _same_contents(thing, before):
            return True
        if not isinstance(thing, dict) or not _same(list(thing), list(before)):
            return False
        pairs = zip(thing.values(), before.values(), strict=True)
        if any(a is not b and not (_is_plain(a) and _is_plain(b)) for a, b in pairs):
            return False
        self._found.containers[index] = (thing, dict(thing))
        return True

    def _slots_stand(self) -> bool:
        assert self._found is not None
        return all(getattr(thing, n, self) is v for thing, slots in self._found.slots for n, v in slots.items())


class StandingCopies:
    """Copies of tensors, in memory that is used again: one launch a device and dtype."""

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self._copies: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; earlier copies are written over."""
        key = [(id(t), t.shape, t.dtype) for t in tensors]  # the groups keep them alive: no other has the id
        if key != self._key or not self._copies:
            self._key, self._copies = key, [torch.empty_like(t) for t in tensors]
            groups: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
            for tensor, copy in zip(tensors, self._copies, strict=True):
                mine, theirs = groups.setdefault((tensor.device, tensor.dtype), ([], []))
                mine.append(copy)
                theirs.append(tensor)  # itself, as another storage may be put behind it
            self._groups = list(groups.values())
        with torch.no_grad():
            for mine, theirs in self._groups:
                foreach_copy_([*map(own_part, mine)], [*map(own_part, theirs)])
        return self._copies

    def release(self) -> None:
        """Free them, unless they are few bytes."""
        if sum(copy.nbytes for copy in self._copies) > KEPT_AT_MOST_BYTES:
            self._key, self._groups, self._copies = [], [], []


def _same(first: Iterable[Any], second: Sequence[Any]) -> bool:
    found = list(first)
    return len(found) == len(second) and all(map(operator.is_, found, second))


def _same_contents(thing: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return _same(thing, list(before)) and _same(thing.values(), list(before.values()))
    return thing == set(before) if isinstance(thing, set) else _same(thing, before)


def _is_plain(value: Any) -> bool:
    """Whether no tensor is in a value: a number, a text, or a tuple of these, as Adam's betas under OneCycleLR."""
    if type(value) is tuple:
        return all(type(each) in NOTHING_INSIDE for each in value)
    return type(value) in NOTHING_INSIDE


def _stays(trail: Trail, tensor: Tensor) -> bool:
    """Whether a tensor is a module's own, an optimizer's, or negligible, so that to hold it a while costs nothing."""
    if _is_negligible(tensor):
        return True
    parent, _ = trail
    if isinstance(tensor, nn.Parameter) or (parent is not None and parent[1] == "_buffers"):
        return True
    while parent is not None and parent[0] is not None:
        parent = parent[0]
    return parent is not None and parent[1] == "optimizers"


def _is_negligible(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.requires_grad:
        return False
    # both: a part of a large storage holds it all, and FSDP empties storages that it fills again
    return max(tensor.nbytes, tensor.untyped_storage().nbytes()) <= NEGLIGIBLE_BYTES
