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
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ctdr_lightning.basics.devices import DeviceModel, model_of
from ctdr_lightning.basics.gpu_memory import counts, free_cache, use_expandable_segments
from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.basics.torch_private import OpOverload
from ctdr_lightning.memory.simulator.evicted import SMALL_SHARE, EvictedSet
from ctdr_lightning.memory.tape.clock import Clock, Timed
from ctdr_lightning.memory.tape.verifier import Verifier
from ctdr_lightning.memory.values.live_bytes import LiveBytes
from ctdr_lightning.memory.values.op_bytes import made_bytes
from ctdr_lightning.memory.values.op_seconds import op_seconds
from ctdr_lightning.memory.values.op_traits import may_run_twice, traits
from ctdr_lightning.memory.values.replay import hold_for_views, materialize
from ctdr_lightning.memory.values.tensors import alias_of, tensors_in
from ctdr_lightning.memory.values.value import Node, Value, root_of
from ctdr_lightning.memory.values.value_table import ValueTable

Cost = Callable[["Evictable"], float]
COSTS: Registry[Cost] = Registry("DTR cost")
# Kept free on a GPU from the first op on: cuDNN takes its workspace inside an op, before its size can be seen. Chosen,
# not tuned.
WORKSPACE_SHARE = 0.05
# Of the budget, given up each time that the allocator has no block for an op: free memory is fragmented, or a workspace
# is larger than the reserve. Chosen, not tuned.
GIVEN_UP_SHARE = 0.05
T = TypeVar("T")


class Evictable:
    """The chooser's view of a value: size, cost, last access, neighbours."""

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
        evictor: Chooses the values to evict.
        table: The values of live tensors.
    """

    def __init__(self, evictor: Evictor, table: ValueTable) -> None:
        self.evictor = evictor
        self._table = table

    def call(self, func: OpOverload, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock) -> Timed:
        """Run an op, capture it, make room. Returns the clock's result."""
        node = self._table.capture(func, index, args, kwargs)
        if traits(func).writes:
            self._table.overwrites(func, args, kwargs)
        out, measured, temp_bytes = self.evictor.attempt(func, args, kwargs, clock.run)
        made = self._table.bind(node, out) if node is not None else []
        seconds = self.evictor.cost_of(measured, func, args, kwargs, out)
        self.evictor.ran(node, [value for value in made if value is not None], out, seconds, temp_bytes)
        return out, measured, temp_bytes

    def pack(self, tensor: Tensor) -> Value:
        """The value of a tensor that autograd saves, held but evictable."""
        value = self._table.known(tensor)
        if value is None:
            return Value.holding(tensor)
        root = root_of(value)
        hold_for_views(value)
        if self.evictor.verifier is not None and root.node is not None:
            self.evictor.verifier.saved(value, tensor, int(root.node.index))
        self.evictor.keep(value, alias_of(tensor))
        return value


def _calls_behind(value: Value) -> Iterator[int]:
    """Indices of the calls that would run to make a value again, were it dropped."""
    stack, seen = [value], {value}
    while stack:
        node = stack.pop().node
        if node is not None:
            yield int(node.index)
            sources = [s for s in node.sources() if s not in seen and s.get() is None]
            seen.update(sources)
            stack += sources


class Evictor:
    """Keeps a step's allocations under a budget by evicting saved values; the tape makes them again.

    Args:
        budget_bytes: Limit of the live bytes that the step itself allocates.
        cost: Name of the cost in DTR's heuristic.
        seed: Seed of the candidate sampling.
        reserve_bytes: Kept free for the next op, as far as is known before the first.
        passing: Tensors from before the step that it may free, beside the budget: they count until then.

    Attributes:
        evictions: How many values were evicted.
        reserve_bytes: Kept free for the next op: as much as any op has made so far, its workspace included.
        replayed: Number of values that were replayed and held.
        verifier: Compares values that come back with the saved contents; None verifies nothing.
        unrepeatable: Indices of the calls that may not run again, as far as the step has shown.
    """

    def __init__(
        self, budget_bytes: int, cost: str = "eq", seed: int = 0, reserve_bytes: int = 0, passing: Iterable[Tensor] = ()
    ) -> None:
        self.live = LiveBytes()
        self.live.track(passing)
        self.budget_bytes = budget_bytes + self.live.now
        self.evictions = 0
        self.replayed = 0
        self._given_up_bytes = 0
        self._cost = COSTS[cost]
        self._random = random.Random(seed)
        self._held: dict[int, Evictable] = {}
        self._now = 0
        self.reserve_bytes = reserve_bytes
        self._gpu: DeviceModel | None = None
        self._device: torch.device | None = None
        self._base_bytes = 0
        self.verifier: Verifier | None = None
        self.unrepeatable: Callable[[], frozenset[int]] = frozenset

    @property
    def counts(self) -> bool:
        """Whether it must see every op to count live bytes; on a GPU the allocator counts them."""
        return self._gpu is None

    def __enter__(self) -> Evictor:
        self.live.__enter__()
        return self

    def on(self, device: torch.device) -> None:
        """The step runs on this device: from now on a GPU's allocator counts, and a model of the GPU tells the costs.

        Args:
            device: That of the step's tensors.
        """
        if device.type != "cuda" or not torch.cuda.is_initialized():
            return
        use_expandable_segments(device)
        self._gpu, self._device = model_of(device), device
        self._base_bytes = counts(device).allocated - self.live.now
        self.reserve_bytes = max(self.reserve_bytes, int(WORKSPACE_SHARE * self.budget_bytes))

    def cost_of(
        self, measured: float, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> float:
        """Seconds of a call that has run; on a GPU modelled, as its host knows only when it handed the call over."""
        return measured if self._gpu is None else op_seconds(self._gpu, func, args, kwargs, out)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.live.__exit__(kind, error, tb)

    def ran(self, node: Node | None, made: list[Value], out: Any, seconds: float, temp_bytes: int = 0) -> None:
        """An op has run: count its outputs, remember its values, make room."""
        self._now += 1
        self.track(out, temp_bytes)
        if node is not None:
            node.seconds = seconds
            for source in node.sources():
                if source.eviction is not None:
                    source.eviction.last = self._now
                    source.eviction.children += [weakref.ref(v) for v in made]
            for value in made:
                value.eviction = Evictable(value, 0, self._now)
                value.eviction.evicted = EvictedSet(seconds)
                near = (s.eviction for s in node.sources() if s.storage_ref is value.storage_ref)
                base = next((eviction for eviction in near if eviction is not None), None)
                if base is not None:
                    value.eviction.join_family(base)
        self.make_room()

    def track(self, out: Any, temp_bytes: int = 0) -> None:
        """Count an op's outputs; room for as much again, and its workspace, is kept free for the next one."""
        outs = out if type(out) in (tuple, list) else (out,)
        before = self.live.now
        self.live.track(outs)
        self.reserve_bytes = max(self.reserve_bytes, self.live.now - before + temp_bytes)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of the backward, count its outputs, make room; storages from before the step are not counted."""
        self.live.ignore(tensors_in((*args, *kwargs.values())))
        out = self.attempt(func, args, kwargs, lambda func, args, kwargs: func(*args, **kwargs))
        self.ran(None, [], out, 0.0)
        return out

    def attempt(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], T],
    ) -> T:
        """Run a call; where the allocator has no block for it, evict and run it again, if that leaves the same behind.

        Args:
            func: The op.
            args: Its arguments.
            kwargs: Its keyword arguments.
            run: Runs it.

        Raises:
            OutOfMemoryError: If nothing is left to evict.
        """
        coming_bytes = made_bytes(func, args, kwargs)
        if coming_bytes > self.reserve_bytes:
            self.reserve_bytes = coming_bytes
            self.make_room()
        result = self._until_it_fits(
            lambda: run(func, args, kwargs), may_repeat=lambda: may_run_twice(func, args, kwargs)
        )
        self.live.note_gather(func, args, kwargs)
        return result

    def _until_it_fits(self, run: Callable[[], T], may_repeat: Callable[[], bool] = lambda: True) -> T:
        while True:
            try:
                return run()
            except torch.OutOfMemoryError:
                if not may_repeat():
                    raise
            # Only here, as the frames of the failed try would keep its tensors.
            if not self._give_up():
                return run()

    def _give_up(self) -> bool:
        """Make do with less from now on. Returns whether that has evicted anything."""
        before, share = self.evictions, max(int(GIVEN_UP_SHARE * self.budget_bytes), 1)
        reached = min(self.live_bytes() + self.reserve_bytes, self._limit_bytes)
        self._given_up_bytes = self.budget_bytes - reached + share
        self.make_room()
        free_cache()
        return self.evictions > before

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
        """A saved value's tensor; values that a replay passes are held again as far as the budget allows."""
        self._now += 1
        if value.eviction is not None:
            value.eviction.last = self._now
        tensor = self._until_it_fits(lambda: materialize(value, self._keep_replayed, self.make_room))
        if self.verifier is not None:
            self.verifier.returned(value, tensor)
        self.make_room()
        return tensor

    def _keep_replayed(self, value: Value, tensor: Tensor) -> None:
        self._now += 1
        self.replayed += 1
        if self.verifier is not None:
            self.verifier.returned(value, tensor)
        self.keep(value, tensor)

    def live_bytes(self) -> int:
        """Bytes that the step has allocated and not freed."""
        return self.live.now if self._gpu is None else counts(self._device).allocated - self._base_bytes

    @property
    def excess_bytes(self) -> int:
        """By how much the step broke the budget so far."""
        return max(self.live.peak - self.budget_bytes, 0)

    @property
    def _limit_bytes(self) -> int:
        return self.budget_bytes - self._given_up_bytes

    def make_room(self) -> None:
        """Evict until the live bytes are under the budget or nothing is left to evict."""
        if self.live_bytes() + self.reserve_bytes <= self._limit_bytes:
            return
        unrepeatable = self.unrepeatable()
        while self.live_bytes() + self.reserve_bytes > self._limit_bytes:
            victim = self._choose(unrepeatable)
            if victim is None:
                return
            self.evict(victim)

    def _choose(self, unrepeatable: frozenset[int]) -> Value | None:
        found = [(c, v) for c in self._candidates() if (v := c.value()) is not None]
        if unrepeatable:
            found = [(c, v) for c, v in found if unrepeatable.isdisjoint(_calls_behind(v))]
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
