"""Calls of other libraries' operators, watched: the first one runs once more, to see whether it repeats itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import first_line
from ctdr_lightning.basics.torch_private import OpOverload, no_dispatch_modes
from ctdr_lightning.memory.values.fingerprint import Fingerprint, differing, has_contents, of_tensor
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.tensors import tensors_in

_RANDOM = "random, without saying so"


class OpTrial:
    """Finds out whether a foreign operator may be replayed.

    It may not if a call moves a random generator, writes to its inputs, or gives other bits on the same inputs.
    The last is tried once for each operator of a process, and costs the time of a call and the memory of its result. An
    operator that keeps a state of its own has moved it once more afterwards; no call of it is repeated from then on.

    Args:
        func: The operator.
        args: Positional arguments of the call that is about to run.
        kwargs: Its keyword arguments.
    """

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._generators = _generators()
        self._inputs = self._read() if traits(func).unproven else []

    def judge(self, out: Any) -> None:
        """Compare a second call with the one that has run, and note the result in the operator's traits.

        Args:
            out: The call's result; fake tensors prove nothing.
        """
        op = traits(self._func)
        if not all(has_contents(t) for t in _tensors(out)):
            return  # nothing ran; what was proven stays proven
        if not op.unproven:
            if not op.pin and not _equal(self._generators, _generators()):
                op.tried(_RANDOM)
            return
        made = _prints(out)
        if None not in made:
            op.tried(self._pin(made))

    def _pin(self, made: list[Fingerprint]) -> str:
        if not _equal(self._generators, _generators()):
            return _RANDOM
        if differing(list(zip(self._inputs, self._read(), strict=True))):
            return "writes to its inputs without declaring it"
        before = _generators()
        try:
            again = _prints(self._func(*self._args, **self._kwargs))
        except Exception as error:
            return f"failed when it was called again ({first_line(error)})"
        if not _equal(before, _generators()):
            _put_back(before)
            return _RANDOM
        return "gives other bits on the same inputs" if differing(list(zip(made, again, strict=True))) else ""

    def _read(self) -> list[Fingerprint]:
        tensors = [t for t in tensors_in((*self._args, *self._kwargs.values())) if has_contents(t)]
        return [number for t in tensors if (number := of_tensor(t)) is not None]


def _prints(out: Any) -> list[Any]:
    return [of_tensor(t) for t in _tensors(out)]


def _tensors(out: Any) -> list[Tensor]:
    return list(tensors_in(out if isinstance(out, (tuple, list)) else (out,)))


def _generators() -> list[Tensor]:
    """The states of the processor's generator and of each GPU's; a GPU's is read without synchronising."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _put_back(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    with no_dispatch_modes():  # states are real tensors, also in a step on fake ones
        return len(before) == len(after) and all(map(torch.equal, before, after))
