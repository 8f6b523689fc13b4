"""Batches to look at a model with: how one is run, how several are made one, and how the model stays untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.interrupts import interrupts_held, put_back_after
from ctdr_lightning.basics.nests import leaves_of
from ctdr_lightning.basics.torch_private import tree_flatten, tree_unflatten

Step = Callable[[nn.Module, Any], Any]
# Forward passes over the merged batch are the price of a refit. 8 million input elements are 54 images of 224 x 224,
# 32,000 digits of 16 x 16: enough rows for every layer, seconds for a ResNet-50 on a CPU.
_MOST_ELEMENTS = 8_000_000
N_BATCHES = 32
# So many of them are looked at for every candidate; those beyond serve the refinement of the one that is taken. Every
# fourth of the former judges and is never fitted to.
_LOOKED_AT, _JUDGING = 8, 4


@dataclass(frozen=True)
class Batches:
    """A few batches and the step that runs one.

    Args:
        fitting: Batches for covariances, gradients and refits.
        judging: Batches on which candidates are compared; the fitting ones if there is only one batch.
        step: Runs a model on a batch: ``step(model, batch)`` gives a scalar loss, or the model's outputs.
        more: Further batches on which the factors of the chosen candidate are refined.
    """

    fitting: Sequence[Any]
    judging: Sequence[Any]
    step: Step
    more: Sequence[Any] = ()

    @classmethod
    def draw(cls, data: Iterable[Any], n_batches: int, step: Step | None) -> Batches:
        """Take the first batches of some data.

        Args:
            data: Tensors, mappings of keyword arguments, or tuples whose first entry is the input.
            n_batches: How many at most.
            step: As above; None calls the model on the batch's input.

        Raises:
            ConfigError: If there is no batch.
        """
        drawn = first_batches(data, n_batches)
        if not drawn:
            raise ConfigError("data has no batch.", "Give a data loader, or a list of batches.")
        looked_at, more = drawn[:_LOOKED_AT], drawn[_LOOKED_AT:]
        judging = looked_at[_JUDGING - 1 :: _JUDGING] or looked_at[-1:]
        fitting = [batch for batch in looked_at if not any(batch is other for other in judging)]
        more = [batch for batch in more if not any(batch is other for other in judging)]
        return cls(fitting or judging, judging, step or call, more)


def first_batches(data: Iterable[Any], n_batches: int = N_BATCHES) -> list[Any]:
    """The first batches of some data, fewer where they are large; no other is read.

    Args:
        data: Batches, nested in any way.
        n_batches: How many at most.
    """
    drawn: list[Any] = []
    n_elements = 0
    for batch in islice(data, n_batches):
        drawn.append(batch)
        n_elements += sum(leaf.numel() for leaf in leaves_of(batch) if isinstance(leaf, Tensor))
        if n_elements > _MOST_ELEMENTS:
            break
    return drawn


def set_aside(drawn: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Batches to choose and refine by, and every second of those beyond the ones that are looked at for candidates.

    Args:
        drawn: As `first_batches` gave them.
    """
    beyond = drawn[_LOOKED_AT:]
    return [*drawn[:_LOOKED_AT], *beyond[::2]], [*beyond[1::2]]


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch's input: all of a mapping, the first entry of a tuple, or the tensor itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, list | tuple) else batch)


def merged(batches: Sequence[Any]) -> Any:
    """One batch of those that have the first one's structure and shapes, up to a number of elements.

    Tensors are joined along their first axis where that is the batch's; everything else is the first batch's.
    """
    first, structure = tree_flatten(batches[0])
    alike = [first]
    n_elements = _elements(first)
    for batch in batches[1:]:
        leaves, other = tree_flatten(batch)
        n_elements += _elements(leaves)
        if n_elements <= _MOST_ELEMENTS and other == structure and _joinable(first, leaves):
            alike.append(leaves)
    size = batch_size(first)
    joined = [torch.cat(parts) if _is_batched(parts[0], size) else parts[0] for parts in zip(*alike, strict=True)]
    return tree_unflatten(joined, structure)


def batch_size(leaves: Sequence[Any]) -> int:
    """Length of the first axis of the first tensor that has one; 0 where none has."""
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)


def _elements(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _is_batched(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size


def _joinable(first: Sequence[Any], leaves: Sequence[Any]) -> bool:
    pairs = [(a, b) for a, b in zip(first, leaves, strict=True) if isinstance(a, Tensor)]
    return bool(pairs) and all(
        isinstance(b, Tensor) and a.ndim > 0 and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs
    )


@contextmanager
def untouched(model: nn.Module, training: bool | None = None, gradients: bool = False) -> Iterator[None]:
    """Put modes, buffers and random state back afterwards; compiled modules run eagerly.

    Args:
        model: Any module.
        training: The mode to run in; None leaves every module's own.
        gradients: Whether autograd records.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    entered = ExitStack()

    def put_back() -> None:
        entered.close()
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    with put_back_after(put_back):
        with interrupts_held():  # both switches act when they are made: one made and not entered would stay
            # Hooks listen to layers, and a compiled module has no layers: it runs eagerly meanwhile.
            entered.enter_context(torch.compiler.set_stance("force_eager"))
            entered.enter_context(torch.set_grad_enabled(gradients))
            entered.enter_context(torch.random.fork_rng(devices=list(devices)))
        if training is not None:
            model.train(training)
        yield
