"""Random calls that are run again: with the state that their generator had, which then gets its own state back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a processor or a GPU."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class Draw:
    """The state of a device's default generator before a call that draws from it.

    Args:
        device: Of the call.

    Example:
        >>> draw = Draw(torch.device("cpu"))
        >>> torch.equal(torch.rand(3), draw.again(torch.rand, [3], {}))
        True
    """

    __slots__ = ("_generator", "_state")

    def __init__(self, device: torch.device) -> None:
        self._generator = generator_of(device)
        self._state = self._generator.clone_state()  # in memory that no allocator of tensors counts

    def again(self, run: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run the call with the generator as it was; the generator goes on from where it is.

        Args:
            run: Draws from the generator.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        now = self._generator.clone_state()
        _put(self._generator, self._state)
        try:
            return run(*args, **kwargs)
        finally:
            _put(self._generator, now)


def _put(generator: torch.Generator, state: torch.Generator) -> None:
    if generator.device.type == "cpu":
        generator.set_state(state.get_state())
    else:
        # `set_state` has cuDNN draw the states of its recurrent layers anew (ATen/cuda/CUDAGeneratorImpl.cpp). The
        # copy is what the generator advances from here on.
        generator.graphsafe_set_state(state.clone_state())
