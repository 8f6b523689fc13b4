"""A twin of an optimizer, of the same class and settings, whose tensors have sizes alone: its steps take no memory.

Whatever the optimizer has is copied with it (its state, objects of its own, generators, an optimizer that it wraps), so
that no step of the twin reaches the original.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ctdr_lightning.basics.torch_private import FakeTensor
from ctdr_lightning.memory.holders.optimizer_state import updates_one_by_one
from ctdr_lightning.memory.holders.optimizer_state_tensors import parts_of
from ctdr_lightning.memory.values.tensors import own_part

_READS: dict[Any, Callable[[int], Any]] = {Tensor.__bool__: bool, Tensor.__float__: float, Tensor.__int__: int}


class ReadsAsOne(TorchFunctionMode):
    """Numbers that are read from tensors without contents are 1, so that a step that branches by one can be sized."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reads = func is Tensor.item or func in _READS
        if reads and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return _READS.get(func, float if args[0].is_floating_point() else int)(1)
        return func(*args, **(kwargs or {}))


def twin_without_memory(
    optimizer: Optimizer, only: set[Tensor] | None = None, device: str | None = "meta"
) -> Optimizer:
    """Make the twin of an optimizer, without hooks.

    Args:
        optimizer: It is not changed.
        only: The parameters that the twin has; None for all that are trained.
        device: Of its tensors; None for their own ones, under a mode that makes fake tensors.

    Raises:
        TypeError: If it holds something that cannot be copied without memory, such as a module.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {p for p in params if p.requires_grad and (only is None or p in only)}
    made: Optimizer = _Copies(kept, {p for p in params if p not in kept}, device).of(optimizer)
    return made


class _Copies:
    """Copies things, each once; of their tensors only the sizes."""

    def __init__(self, kept: set[Tensor], left_out: set[Tensor], device: str | None) -> None:
        self._left_out, self._device = left_out, device
        self._made: dict[int, Any] = {id(p): nn.Parameter(self._empty(own_part(p).detach())) for p in kept}

    def of(self, thing: Any) -> Any:
        """The copy of a thing."""
        if id(thing) not in self._made:
            self._made[id(thing)] = self._copied(thing)
        return self._made[id(thing)]

    def _copied(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return self._sized(thing)
        if isinstance(thing, dict | list):
            return self._filled(thing)
        if type(thing) in (tuple, set):
            return type(thing)(self.of(each) for each in thing)
        if isinstance(thing, MethodType):
            return MethodType(thing.__func__, self.of(thing.__self__))
        if isinstance(thing, nn.Module):
            raise TypeError("an optimizer that holds a module has no twin: the module would be copied in full")
        return self._object(thing) if hasattr(thing, "__dict__") else deepcopy(thing)

    def _filled(self, thing: Any) -> Any:
        self._made[id(thing)] = new = copy(thing)  # of the same kind, a defaultdict say
        new.clear()
        if isinstance(thing, dict):
            new.update({self.of(k): self.of(v) for k, v in thing.items() if not self._is_left_out(k)})
        else:
            new.extend(self.of(each) for each in thing if not self._is_left_out(each))
        return new

    def _is_left_out(self, thing: Any) -> bool:
        return isinstance(thing, Tensor) and thing in self._left_out

    def _object(self, thing: Any) -> Any:
        if isinstance(thing, Optimizer):
            return self._optimizer(thing)
        self._made[id(thing)] = new = copy(thing)
        if new is not thing:  # functions, classes and members of an enumeration are
            vars(new).update({name: self.of(value) for name, value in vars(thing).items()})
        return new

    def _optimizer(self, optimizer: Optimizer) -> Any:
        kind: Any = type(optimizer)
        self._made[id(optimizer)] = twin = kind.__new__(kind)
        # neither hooks nor the step that schedulers put over the class's own
        own = {k: v for k, v in vars(optimizer).items() if not k.startswith("_optimizer_") and k != "step"}
        if updates_one_by_one(optimizer):  # torch's keep counters as tensors, and make all of their state in a step
            own["state"] = defaultdict(dict)
        twin.__setstate__({name: self.of(value) for name, value in own.items()})
        return twin

    def _empty(self, like: Tensor) -> Tensor:
        device = self._device or like.device
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    def _sized(self, tensor: Tensor) -> Tensor:
        own = own_part(tensor).detach()
        if own.dim() == 0 and self._device is not None and not own.is_meta:
            return own.cpu().clone()  # a counter or a learning rate, which the step may read
        parts = parts_of(own)
        if not parts:
            return self._empty(own)
        kind: Any = type(own)
        names, context = kind.__tensor_flatten__(own)
        inner = dict(zip(names, map(self._sized, parts), strict=True))
        found: Tensor = kind.__tensor_unflatten__(inner, context, own.shape, own.stride())
        return found
