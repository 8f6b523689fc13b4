"""Random draws fixed by sample, so that the losses of the same samples can be compared, whole and in parts.

Noise, masks and the times of a diffusion are drawn anew for each part of a batch, as dropout is. They say nothing about
whether a loss is a mean over samples, but they make each call's loss another one. Here each sample draws the same
numbers in every call; orders of samples are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import OpOverload, TorchDispatchMode

# Multiples of the golden ratio, modulo 1, are spread evenly.
_GOLDEN = 0.6180339887498949
_Fix = Callable[[Tensor, Tensor, tuple[Any, ...], str], Tensor]


class FixedDraws(TorchDispatchMode):
    """Has torch's functions that draw return numbers that follow from the sample and the place in it.

    Args:
        first: Samples that come before those of this step, over the number of its own.
        whole: Shapes that the step of all samples drew; one that is the same again belongs to no sample.

    Attributes:
        shapes: Those that were drawn, in order.

    Example:
        >>> with FixedDraws() as draws:
        ...     whole, shift = torch.rand(3, 2), torch.rand(2)
        >>> with FixedDraws(0.5, draws.shapes):  # two samples, after one
        ...     part, again = torch.rand(2, 2), torch.rand(2)
        >>> torch.equal(whole[1:], part), torch.equal(shift, again)
        (True, True)
    """

    def __init__(self, first: float = 0.0, whole: Sequence[torch.Size] = ()) -> None:
        super().__init__()
        self._first, self._whole = first, whole
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and write over what it drew."""
        out = func(*args, **(kwargs or {}))
        fix = _FIXED.get(func.overloadpacket.__name__)
        if fix is None:
            return out
        of_all = self._whole[len(self.shapes) : len(self.shapes) + 1] == [out.shape]
        self.shapes.append(out.shape)
        return fix(out, self._spread(out, 0.0 if of_all else self._first), args, func._overloadname)

    @staticmethod
    def _spread(out: Tensor, share: float) -> Tensor:
        """Numbers from 0 to 1 in a tensor's shape, after those of the samples before."""
        first = round(share * out.numel())
        places = torch.arange(first, first + out.numel(), dtype=torch.float64, device=out.device)
        return (places * _GOLDEN % 1).view(out.shape)


def _uniform(out: Tensor, spread: Tensor, args: tuple[Any, ...], kind: str) -> Tensor:
    return out.copy_(spread)


def _normal(out: Tensor, spread: Tensor, args: tuple[Any, ...], kind: str) -> Tensor:
    return out.copy_(2 * spread - 1)


def _coins(out: Tensor, spread: Tensor, args: tuple[Any, ...], kind: str) -> Tensor:
    chance = args[0] if kind in ("default", "out") and args[0] is not out else args[1] if len(args) > 1 else 0.5
    return out.copy_(spread < chance)


def _whole_numbers(out: Tensor, spread: Tensor, args: tuple[Any, ...], kind: str) -> Tensor:
    limits = [arg for arg in args if isinstance(arg, int)] or [1]
    low, high = (limits[0], limits[1]) if len(limits) > 1 else (0, limits[0])
    return out.copy_(low + (spread * (high - low)).floor())


def _order(out: Tensor, spread: Tensor, args: tuple[Any, ...], kind: str) -> Tensor:
    return out.copy_(torch.arange(len(out), device=out.device))


# By an operator's name. Another one that draws makes the loss of each call another one, as before.
_FIXED: dict[str, _Fix] = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "uniform_", "exponential", "exponential_"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "normal_functional"), _normal),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _coins),
    **dict.fromkeys(("randint", "randint_like", "random_"), _whole_numbers),
    "randperm": _order,
}
