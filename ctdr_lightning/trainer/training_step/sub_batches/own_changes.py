"""Parameters and buffers that a step itself changes, such as the moving average of a target network.

Where each part of a batch changes them as the whole batch does, they are put back before each later part: all parts
find what the whole batch finds, and leave what it leaves. Such are averages of weights, counters, and the vectors of
spectral norms. Queues and centres of samples are none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.torch_private import foreach_copy_
from ctdr_lightning.memory.values.tensors import version_of
from ctdr_lightning.trainer.training_step.sub_batches.batch_norm import BY_BATCH

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

    def __init__(self, module: nn.Module, names: Collection[str] = ()) -> None:
        self._places = [_place(module, name) for name in names]
        self._before: list[tuple[Tensor, Tensor]] = []
        self._others = {name: _place(module, name) for name in _untrained(module) if name not in set(names)}
        self._versions: list[int] = []

    @property
    def n_bytes(self) -> int:
        """Size of the copies."""
        return sum(held[leaf].nbytes for held, leaf in self._places)

    def note(self) -> None:
        """Copy the tensors before the first part."""
        tensors = [held[leaf] for held, leaf in self._places]
        self._before = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._versions = self._versions_now()

    def unforeseen(self) -> str:
        """The first other tensor that has changed since: its step does so in some batches alone. Empty for none."""
        pairs = zip(self._others, self._versions, self._versions_now(), strict=True)
        return next((name for name, before, now in pairs if now != before), "")

    def _versions_now(self) -> list[int]:
        return [version_of(held[leaf]) for held, leaf in self._others.values()]

    def put_back(self) -> None:
        """Undo the changes of a part."""
        if self._before:
            with torch.no_grad():
                foreach_copy_([tensor for tensor, _ in self._before], [copied for _, copied in self._before])
        for (held, leaf), (tensor, _) in zip(self._places, self._before, strict=True):
            held[leaf] = tensor  # the step may have assigned another

    def forget(self) -> None:
        """Drop the copies."""
        self._before = []


def _place(module: nn.Module, name: str) -> tuple[dict[str, Tensor], str]:
    """The dictionary that holds a parameter or buffer, and its name there."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    held = part._buffers if leaf in part._buffers else part._parameters
    return held, leaf  # type: ignore[return-value]  # those that are None have no name here


def _untrained(module: nn.Module) -> Iterator[str]:
    """Names of frozen parameters and buffers; BatchNorm's own change in each part, and have an account of theirs."""
    norms = {id(buffer) for part in module.modules() if isinstance(part, BY_BATCH) for buffer in part.buffers()}
    yield from (name for name, parameter in module.named_parameters() if not parameter.requires_grad)
    yield from (name for name, buffer in module.named_buffers() if id(buffer) not in norms)


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
