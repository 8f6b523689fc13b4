"""Batches from words (``--input input_ids=8,128:int64``) or from a data module (``--data module:callable``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.errors import ConfigError, CTDRError, first_line
from ctdr_lightning.basics.torch_private import tree_leaves, tree_map, tree_map_only
from ctdr_lightning.command_line.named import build

_INPUT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:,\d+)*)?(?::(?P<dtype>\w+))?")
# torch knows 50 more; nobody feeds a network with them.
_DTYPES = (
    "float32", "float64", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """One tensor of a batch.

    Attributes:
        name: Keyword under which the model takes it; empty for a positional one.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def read(cls, text: str) -> Input:
        """Read ``[name=]shape[:dtype]``.

        Raises:
            ConfigError: If it is anything else.

        Example:
            >>> Input.read("input_ids=8,128:int64").shape
            (8, 128)
        """
        match = _INPUT.fullmatch(text)
        if match is None or not (match["shape"] or match["dtype"]):
            raise ConfigError(
                f"--input {text!r} is not a shape.",
                "Write 64,3,224,224, or with name and dtype: input_ids=8,128:int64.",
            )
        if (match["dtype"] or "float32") not in _DTYPES:
            raise ConfigError(f"--input {text!r}: no dtype {match['dtype']!r}.", f"Valid names: {', '.join(_DTYPES)}.")
        shape = tuple(map(int, match["shape"].split(","))) if match["shape"] else ()
        return cls(match["name"] or "", shape, getattr(torch, match["dtype"] or "float32"))

    def make(self, *batch: int) -> Tensor:
        """A tensor like it, on the meta device; sizes given come before its own."""
        return torch.empty(*batch, *self.shape, dtype=self.dtype, device="meta")


def from_inputs(inputs: Sequence[Input], *batch: int) -> Any:
    """The batch: one tensor, a tuple of several, or a dict of named ones.

    Raises:
        ConfigError: If only some are named, or two bear one name.
    """
    names = [entry.name for entry in inputs]
    if any(names) and (not all(names) or len(set(names)) < len(names)):
        raise ConfigError(f"--input: names {names} do not make a batch.", "Name each --input differently, or none.")
    tensors = [entry.make(*batch) for entry in inputs]
    if all(names):
        return dict(zip(names, tensors, strict=True))
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def from_data(name: str) -> Any:
    """The first training batch of a data module, a loader, or anything to iterate over.

    Raises:
        ConfigError: If there is none; with the error of the data.
    """
    data = build(name, "data", "my_project:DigitsData")
    try:
        loader = _loader(data)
        batch = tree_map(lambda one: next(iter(one)), loader, is_leaf=lambda found: not isinstance(found, Mapping))
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if callable(getattr(data, hook, None)):
                batch = getattr(data, hook)(batch, 0)
    except CTDRError:
        raise
    except Exception as error:  # somebody else's code: it may raise anything
        raise ConfigError(
            f"data {name!r} gives no batch: {first_line(error)}.", "Try its train_dataloader()."
        ) from error
    return batch


def _loader(data: Any) -> Iterable[Any]:
    if not hasattr(data, "train_dataloader"):
        return data
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()


def resized(batch: Any) -> Callable[[int], Any]:
    """From a batch to a function that makes one of another size: the first axis of each tensor that has the batch's.

    Raises:
        ConfigError: If the batch holds no tensor with an axis.
    """
    sizes = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes:
        raise ConfigError("The batch of --data holds no tensor.", "Give the sample's shape as --input.")

    def made(size: int) -> Any:
        def like(tensor: Tensor) -> Tensor:
            if not tensor.ndim or len(tensor) != sizes[0]:
                return tensor
            return torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

        return tree_map_only(Tensor, like, batch)

    return made
