"""Parameters and buffers that a step itself changes, such as the moving average of a target network.

Where each part of a batch changes them as the whole batch does, they are put back before each later part: all parts
find what the whole batch finds, and leave what it leaves. Such are averages of weights, counters, and the vectors of
spectral norms. Queues and centres of samples are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ctdr_lightning.memory.values.tensors import version_of

_Versions = dict[str, tuple[Tensor, int]]


class OwnChanges:
    """Tensors of a module that its step changes.

    Args:
        module: In training.
        names: Of its parameters and buffers.

    Example:
        >>> net = nn.Module()
        >>> net.register_buffer("steps", torch.zeros(()))
        >>> changes = OwnChanges(net, ["steps"])
        >>> changes.note()
        >>> _ = net.steps.add_(1)
        >>> changes.put_back()
        >>> int(net.steps), changes.n_bytes
        (0, 4)
    """

    def __init__(self, module: nn.Module, names: Iterable[str] = ()) -> None:
        self._places = [_place(module, name) for name in names]
        self._before: list[tuple[Tensor, Tensor]] = []

    @property
    def n_bytes(self) -> int:
        """Size of the copies."""
        return sum(held[leaf].nbytes for held, leaf in self._places)

    def note(self) -> None:
        """Copy the tensors before the first part."""
        tensors = [held[leaf] for held, leaf in self._places]
        self._before = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        """Undo the changes of a part."""
        with torch.no_grad():
            for (held, leaf), (tensor, copied) in zip(self._places, self._before, strict=True):
                held[leaf] = tensor.copy_(copied)

    def forget(self) -> None:
        """Drop the copies."""
        self._before = []


def _place(module: nn.Module, name: str) -> tuple[dict[str, Tensor], str]:
    """The dictionary that holds a parameter or buffer, and its name there."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    held = part._buffers if leaf in part._buffers else part._parameters
    return held, leaf  # type: ignore[return-value]  # those that are None have no name here


def noted(module: nn.Module) -> _Versions:
    """A module's parameters and buffers, with their in-place versions."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: (tensor, version_of(tensor)) for name, tensor in tensors}


def changed_since(module: nn.Module, before: _Versions) -> dict[str, Tensor]:
    """Copies of those that have changed, by name; new ones are none."""
    return {
        name: tensor.detach().clone()
        for name, (tensor, version) in noted(module).items()
        if name in before and (tensor is not before[name][0] or version != before[name][1])
    }


def first_difference(whole: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> str:
    """The first name whose tensor another step leaves with other numbers; empty where there is none."""
    names = sorted({*whole, *part})
    return next((n for n in names if n not in whole or n not in part or not torch.equal(whole[n], part[n])), "")
