"""A batch cut into smaller ones along its first dimension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.nests import leaves_of, map_leaves, tensors_of

_HINT = (
    "Give each tensor of the batch one row a sample, in dicts, lists, tuples and dataclasses, or leave sub_batches out."
)


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of a batch.

    Attributes:
        share: Which part of the batch's samples they are.
        batch: The samples, as views of the batch.
    """

    share: float
    batch: Any


def n_samples(batch: Any) -> int:
    """Number of samples in a batch.

    Args:
        batch: A nest of tensors with one row a sample; tensors without dimensions and plain objects belong to all.

    Raises:
        ConfigError: If it cannot be cut: there are no such tensors, or their first sizes differ.

    Example:
        >>> from torch import zeros
        >>> n_samples({"image": zeros(6, 3), "names": ["a"] * 6, "scale": 2.0})
        6
    """
    leaves = leaves_of(batch, _is_words)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and next(tensors_of(leaf), None) is not None:
            raise ConfigError(f"The batch holds tensors in a {type(leaf).__name__}, which cannot be cut.", _HINT)
    sizes = {int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if not sizes:
        raise ConfigError(f"The batch, a {type(batch).__name__}, holds no tensor with a row for each sample.", _HINT)
    if len(sizes) > 1:
        shown = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(f"The batch cannot be cut: first sizes of its tensors differ ({shown}).", _HINT)
    return sizes.pop()


def can_be_cut(batch: Any) -> bool:
    """Whether a batch has several samples, in a form that can be cut.

    Example:
        >>> from torch import zeros
        >>> can_be_cut(zeros(6, 3)), can_be_cut(zeros(1, 3)), can_be_cut("words")
        (True, False, False)
    """
    try:
        return n_samples(batch) > 1
    except ConfigError:
        return False


def cut(batch: Any, first: int, end: int) -> Any:
    """Some samples of a batch that `n_samples` accepts.

    Args:
        batch: The batch.
        first: The first sample.
        end: The one after the last.
    """
    whole = n_samples(batch)
    return map_leaves(lambda leaf: _cutter(leaf, whole)(first, end), batch, _is_words)


def parts_of(batch: Any, number: int) -> list[Part]:
    """Cut a batch into parts whose sizes differ by one at most, the larger ones first.

    Args:
        batch: The batch.
        number: How many parts; where there are fewer samples, each is a part.

    Example:
        >>> from torch import arange
        >>> [part.batch.tolist() for part in parts_of(arange(5), 2)]
        [[0, 1, 2], [3, 4]]
    """
    whole = n_samples(batch)
    number = max(min(number, whole), 1)
    least, more = divmod(whole, number)
    ends = [least * (index + 1) + min(index + 1, more) for index in range(number)]
    return [
        Part((end - first) / max(whole, 1), cut(batch, first, end))
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def _is_words(node: Any) -> bool:
    """A list of strings: one a sample, where there are as many."""
    return isinstance(node, list | tuple) and bool(node) and all(isinstance(entry, str) for entry in node)


def _cutter(leaf: Any, whole: int) -> Callable[[int, int], Any]:
    rows = leaf.ndim > 0 if isinstance(leaf, Tensor) else _is_words(leaf) and len(leaf) == whole
    return (lambda first, end: leaf[first:end]) if rows else (lambda first, end: leaf)
