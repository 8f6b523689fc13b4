"""Online eviction under a live-byte budget: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021).

arXiv 2006.09616. Reproduced: eviction of the tensor with the least h = cost / (bytes * staleness); the three costs
``full`` (h_DTR: own cost and that of the evicted neighbourhood), ``eq`` (h^eq: the neighbourhood's cost by union-find)
and ``local`` (own cost); the two run-time tricks: tensors under 1 % of the mean size are ignored, and sqrt(N)
candidates are sampled. Left out: eviction of tensors that the program still holds, and banishing; reference counting
does that here. Cost of an eviction: O(sqrt(N)) evaluations of h.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.search.evicted import SMALL_SHARE, EvictedSet
from ctdr_lightning.memory.tape.clock import Clock, Timed
from ctdr_lightning.memory.values.live_bytes import LiveBytes
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.replay import hold_for_views, materialize
from ctdr_lightning.memory.values.tensors import alias_of
from ctdr_lightning.memory.values.value import Node, Value
from ctdr_lightning.memory.values.value_table import ValueTable

Cost = Callable[["Evictable"], float]
COSTS: Registry[Cost] = Registry("DTR cost")


class Evictable:
    """What the chooser knows of a value: size, cost, last access, neighbours."""

    __slots__ = ("children", "evicted", "family", "last", "n_bytes", "value")

    def __init__(self, value: Value, n_bytes: int, now: int) -> None:
        self.value = weakref.ref(value)
        self.n_bytes = n_bytes
        self.last = now
        self.children: list[weakref.ref[Value]] = []
        self.evicted: EvictedSet | None = None
        self.family = [self.value]

    def relatives(self) -> tuple[Value, ...]:
        """The value itself and those on the same storage, which only goes when all of them do."""
        return tuple(value for ref in self.family if (value := ref()) is not None)

    def join_family(self, base: Evictable) -> None:
        """The value is a view of another, or was written over it."""
        self.family = base.family
        self.family.append(self.value)

    def own_cost(self) -> float:
        """Seconds of the op that makes the value."""
        value = self.value()
        return value.node.seconds if value is not None and value.node is not None else 0.0

    def neighbours(self) -> Iterator[Evictable]:
        """Sources and readers that are evicted now."""
        value = self.value()
        if value is None or value.node is None:
            return
        for near in (*value.node.sources(), *(c for ref in self.children if (c := ref()) is not None)):
            if near.tensor is None and near.node is not None and near.eviction is not None:
                yield near.eviction


@COSTS.register("local")
def local_cost(candidate: Evictable) -> float:
    """The value's own op."""
    return candidate.own_cost()


@COSTS.register("eq")
def eq_cost(candidate: Evictable) -> float:
    """Own op and the equivalence classes of evicted neighbours, kept by union-find."""
    roots = {id(n.evicted.root()): n.evicted.root() for n in candidate.neighbours() if n.evicted is not None}
    return candidate.own_cost() + sum(r.cost for r in roots.values())


@COSTS.register("full")
def full_cost(candidate: Evictable) -> float:
    """Own op and every evicted value that a replay of this one, or of its readers, would pass."""
    seen, stack, total = {id(candidate)}, [candidate], candidate.own_cost()
    while stack:
        for near in stack.pop().neighbours():
            if id(near) not in seen:
                seen.add(id(near))
                stack.append(near)
                total += near.own_cost()
    return total


class Online:
    """The tape without a plan: every call that may be replayed is captured, every saved value can be evicted.

    Args:
        evictor: Chooses what to evict.
        table: Where live tensors find their values.
    """

    def __init__(self, evictor: Evictor, table: ValueTable) -> None:
        self.evictor = evictor
        self._table = table

    def call(self, func: OpOverload, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock) -> Timed:
        """Run an op, capture it, make room. Returns what the clock returned."""
        node = self._table.capture(func, index, args, kwargs)
        if traits(func).writes:
            self._table.overwrites(func, args, kwargs)
        timed = clock.run(func, args, kwargs)
        made = self._table.bind(node, timed[0]) if node is not None else []
        self.evictor.ran(node, [value for value in made if value is not None], timed[0], timed[1])
        return timed

    def pack(self, tensor: Tensor) -> Value:
        """The value of a tensor that autograd saves, held but evictable."""
        value = self._table.known(tensor)
        if value is None:
            return Value.holding(tensor)
        hold_for_views(value)
        self.evictor.keep(value, alias_of(tensor))
        return value


class Evictor:
    """Keeps what a step allocates under a budget by evicting saved values; the tape makes them again.

    Args:
        budget_bytes: Live bytes, of what the step itself allocates, not to be exceeded.
        cost: Name of the cost in DTR's heuristic.
        seed: Seed of the candidate sampling.
        reserve_bytes: Kept free for the next op, as far as is known before the first.

    Attributes:
        evictions: How many values were evicted.
        reserve_bytes: Kept free for the next op: as much as any op has made so far.
        replayed: How many values were made again and held.
    """

    def __init__(self, budget_bytes: int, cost: str = "eq", seed: int = 0, reserve_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.live = LiveBytes()
        self.evictions = 0
        self.replayed = 0
        self._cost = COSTS[cost]
        self._random = random.Random(seed)
        self._held: dict[int, Evictable] = {}
        self._now = 0
        self.reserve_bytes = reserve_bytes
        self._cuda_base = 0

    @property
    def counts(self) -> bool:
        """Whether it must see every op to know what is live; a GPU's allocator tells."""
        return not self._cuda_base

    def __enter__(self) -> Evictor:
        self.live.__enter__()
        self._cuda_base = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.live.__exit__(kind, error, tb)

    def ran(self, node: Node | None, made: list[Value], out: Any, seconds: float) -> None:
        """An op has run: count its outputs, remember what it made, make room."""
        self._now += 1
        self.track(out)
        if node is not None:
            node.seconds = seconds
            for source in node.sources():
                if source.eviction is not None:
                    source.eviction.last = self._now
                    source.eviction.children += [weakref.ref(v) for v in made]
            for value in made:
                value.eviction = Evictable(value, 0, self._now)
                value.eviction.evicted = EvictedSet(seconds)
                base = next(
                    (
                        s.eviction
                        for s in node.sources()
                        if s.eviction is not None and s.storage_ref is value.storage_ref
                    ),
                    None,
                )
                if base is not None:
                    value.eviction.join_family(base)
        self.make_room()

    def track(self, out: Any) -> None:
        """Count what an op has made; room for as much again is kept free for the next one."""
        outs = out if type(out) in (tuple, list) else (out,)
        before = self.live.now
        self.live.track(outs)
        self.reserve_bytes = max(self.reserve_bytes, self.live.now - before)

    def keep(self, value: Value, tensor: Tensor) -> None:
        """Hold a value that was saved or made again, but so that it can be evicted (again)."""
        value.keep(tensor)
        if value.eviction is None:
            value.eviction = Evictable(value, 0, self._now)
        value.eviction.n_bytes = tensor.untyped_storage().nbytes()
        value.eviction.last = self._now
        value.eviction.evicted = None
        self._held[id(value)] = value.eviction

    def fetch(self, value: Value) -> Tensor:
        """A saved value's tensor; what a replay passes is held again as far as the budget allows."""
        self._now += 1
        if value.eviction is not None:
            value.eviction.last = self._now
        tensor = materialize(value, self._keep_replayed)
        self.make_room()
        return tensor

    def _keep_replayed(self, value: Value, tensor: Tensor) -> None:
        self._now += 1
        self.replayed += 1
        self.keep(value, tensor)
        self.make_room()

    def live_bytes(self) -> int:
        """What the step has allocated and not freed."""
        return torch.cuda.memory_allocated() - self._cuda_base if self._cuda_base else self.live.now

    def make_room(self) -> None:
        """Evict until the live bytes are under the budget or nothing is left to evict."""
        while self.live_bytes() + self.reserve_bytes > self.budget_bytes:
            victim = self._choose()
            if victim is None:
                return
            self.evict(victim)

    def _choose(self) -> Value | None:
        found = [(c, v) for c in self._candidates() if (v := c.value()) is not None]
        if not found:
            return None
        least = SMALL_SHARE * sum(c.n_bytes for c, _ in found) / len(found)
        large = [(c, v) for c, v in found if c.n_bytes >= least]
        sample = self._random.sample(large, math.isqrt(len(large) - 1) + 1)
        return min(sample, key=lambda pair: self._score(pair[0]))[1]

    def _candidates(self) -> Iterator[Evictable]:
        for key, candidate in list(self._held.items()):
            value = candidate.value()
            if value is None or value.tensor is None or value.node is None:
                del self._held[key]
            elif not any(near.live() is not None for near in candidate.relatives()):
                yield candidate

    def _score(self, candidate: Evictable) -> float:
        staleness = self._now - candidate.last + 1
        return self._cost(candidate) / (max(candidate.n_bytes, 1) * staleness)

    def evict(self, value: Value) -> None:
        """Drop a value and all that hold the same storage: one alone would free nothing."""
        storage = value.tensor.untyped_storage() if value.tensor is not None else None
        for near in value.eviction.relatives():
            if near.node is not None and near.tensor is not None and near.tensor.untyped_storage() is storage:
                self._drop(near)
        self.evictions += 1

    def _drop(self, value: Value) -> None:
        candidate = value.eviction
        value.tensor = None
        self._held.pop(id(value), None)
        candidate.evicted = EvictedSet(candidate.own_cost())
        for near in candidate.neighbours():
            if near.evicted is not None:
                candidate.evicted.join(near.evicted)
