"""CUDA's autocast for tensors that stand in for a GPU's: the casts of torch's own kernels, by the lists in `gpu_rules`.

torch's kernels ask each tensor for its device, which autograd must take for the processor on a build without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import DispatchKey, DispatchKeySet, ExcludeKeys, OpOverload, tree_map_only
from ctdr_lightning.memory.recorder import gpu_rules
from ctdr_lightning.memory.recorder.gpu_rules import Rule
from ctdr_lightning.memory.values.tensors import tensors_in, wants_grad_itself

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCUDA)


class Autocast:
    """The kernels of one recording, with the weights that they have cast."""

    def __init__(self) -> None:
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # with the weight itself, so that no other takes its id

    def rules(self) -> dict[OpOverload, Rule]:
        """From each operator of CUDA's lists to autocast's version of it."""
        made: dict[OpOverload, Rule] = {}
        kinds: tuple[tuple[Iterable[str], Callable[[OpOverload], Rule]], ...] = (
            (gpu_rules.LOWER.split(), self._lower),
            (gpu_rules.FULL.split(), self._full),
            (gpu_rules.FULL_RESULT.split(), self._full_result),
            (gpu_rules.FULL_APPENDED, self._full_appended),
            (gpu_rules.WIDEST.split(), self._widest),
        )
        for names, kind in kinds:
            made |= {op: kind(op) for name in names if (op := _overload(name)) is not None}
        return made

    @contextmanager
    def forgotten_with_torchs(self) -> Iterator[None]:
        """Let the cast weights go when torch clears its cache: where the outermost block is left."""
        own = torch.clear_autocast_cache

        def clear() -> None:
            self._cast.clear()
            own()

        with patch.object(torch, "clear_autocast_cache", clear):
            yield

    def _lower(self, op: OpOverload) -> Rule:
        return self._all_as(op, lambda _: torch.get_autocast_dtype("cuda"))

    def _full(self, op: OpOverload) -> Rule:
        return self._all_as(op, lambda _: torch.float32)

    def _widest(self, op: OpOverload) -> Rule:
        def widest(args: tuple[Any, ...]) -> torch.dtype:
            full = any(t.dtype is torch.float32 for t in tensors_in(args) if _eligible(t))
            return torch.float32 if full else torch.get_autocast_dtype("cuda")

        return self._all_as(op, widest)

    def _all_as(self, op: OpOverload, dtype_of: Callable[[tuple[Any, ...]], torch.dtype]) -> Rule:
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExcludeKeys(_AUTOCAST):
                dtype = dtype_of((*args, *kwargs.values()))
                # From the last to the first: in this order torch's wheels, which GCC builds, evaluate arguments.
                late = {name: self._all_in(kwargs[name], dtype) for name in reversed(kwargs)}
                cast = [self._all_in(arg, dtype) for arg in reversed(args)]
                return op(*reversed(cast), **late)

        return run

    def _full_result(self, op: OpOverload) -> Rule:
        names = [argument.name for argument in op._schema.arguments]
        place = names.index("dtype")

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExcludeKeys(_AUTOCAST):
                given = args[place] if len(args) > place else kwargs.get("dtype")
                if given is None and _eligible(args[0]):
                    args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
                return op(*args, **kwargs)

        return run

    def _full_appended(self, op: OpOverload) -> Rule:
        name = f"{op._overloadpacket.__name__}.{op._overloadname}"
        typed = _overload(gpu_rules.FULL_APPENDED[name])

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExcludeKeys(_AUTOCAST):
                if typed is None or not _eligible(args[0]):
                    return op(*args, **kwargs)
                return typed(*args, **kwargs, dtype=torch.float32)

        return run

    def _all_in(self, arg: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda tensor: self._as(tensor, dtype), arg)

    def _as(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """`cached_cast`: a weight is cast once a block."""
        if not _eligible(tensor) or tensor.dtype is dtype:
            return tensor
        cached = (
            torch.is_autocast_cache_enabled()
            and dtype is torch.get_autocast_dtype("cuda")
            and tensor.dtype is torch.float32
            and wants_grad_itself(tensor)
        )
        if not cached:
            return tensor.to(dtype)
        if id(tensor) not in self._cast:
            self._cast[id(tensor)] = tensor, tensor.to(dtype)
        return self._cast[id(tensor)][1]


def _eligible(tensor: Any) -> bool:
    """`is_eligible`: floating point, and not double."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _overload(name: str) -> OpOverload | None:
    """An operator by the name that autocast's lists give it; None where this torch has none."""
    packet, _, which = name.partition(".")
    found = getattr(gpu_rules.aten, packet, None)
    return getattr(found, which or "default", None) if found is not None else None
