"""Outputs and logs of the sub-batches of one batch, joined to those of the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from inspect import signature
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from ctdr_lightning.basics.torch_private import no_dispatch_modes

Entry = tuple[float, Any]


class JoinedLogs:
    """Buffers calls of ``log`` in sub-batches and merges those of the same name."""

    def __init__(self) -> None:
        self._inner: Callable[..., Any] | None = None
        self._open = False
        self._calls: list[list[dict[str, Any]]] = []

    def begin(self, part: int) -> None:
        """A sub-batch begins, or begins again: its earlier logs are dropped, and those after it."""
        self._open = True
        del self._calls[part:]
        self._calls.append([])

    def close(self) -> None:
        """Later logs are not of a sub-batch."""
        self._open = False

    def kept_back(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A ``log`` that waits for the last sub-batch."""
        self._inner = inner
        arguments = signature(inner)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._open:
                return inner(*args, **kwargs)
            given = dict(arguments.bind(*args, **kwargs).arguments)
            given["value"] = _detached(given["value"])
            self._calls[-1].append(given)
            return None

        return call

    def tell(self, shares: Sequence[float]) -> None:
        """Log for the whole batch.

        Args:
            shares: Of each sub-batch, its part of the batch's samples.
        """
        self.close()
        rows: dict[tuple[str, int], list[Entry]] = {}
        for share, calls in zip(shares, self._calls, strict=False):
            seen: Counter[str] = Counter()
            for call in calls:
                rows.setdefault((call["name"], seen[call["name"]]), []).append((share, call))
                seen[call["name"]] += 1
        assert self._inner is not None or not rows
        for row in rows.values():
            self._inner(**_one_call(row))  # type: ignore[misc]


def joined_output(outputs: Sequence[Entry], loss: Tensor) -> Any:
    """The result of ``training_step`` for the whole batch.

    Args:
        outputs: Of each sub-batch its share of the batch's samples and its result, detached.
        loss: The whole batch's.
    """
    last = outputs[-1][1]
    if not isinstance(last, dict):
        return loss
    rows = {name: [(share, output[name]) for share, output in outputs if name in output] for name in last}
    return {name: loss if name == "loss" else _one_value(row) for name, row in rows.items()}


def detached_output(output: Any) -> Any:
    """The result of ``training_step``, without graphs."""
    return {name: _detached(value) for name, value in output.items()} if isinstance(output, dict) else None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _one_call(row: list[Entry]) -> dict[str, Any]:
    """One call of ``log`` for the calls of all sub-batches."""
    last: dict[str, Any] = dict(row[-1][1])
    values = [(share, call["value"]) for share, call in row]
    last["value"] = _reduced(values, last.get("reduce_fx", "mean"))
    sizes = [call.get("batch_size") for _, call in row]
    if all(isinstance(size, int) for size in sizes):
        last["batch_size"] = sum(size for size in sizes if size is not None)
    return last


def _one_value(row: list[Entry]) -> Any:
    """Rows of samples one after the other, the mean of single numbers, of anything else the last."""
    values = [value for _, value in row]
    if all(isinstance(value, Tensor) and value.ndim for value in values):
        return torch.cat(values)
    return _reduced(row, "mean")


def _reduced(row: list[Entry], reduce: Any) -> Any:
    """The mean by samples, or the sum, least or largest as for ``log``; the last entry if it is not a single number."""
    if not all(isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1) for _, value in row):
        return row[-1][1]
    with no_dispatch_modes(), torch.no_grad():
        values = torch.stack([_as_float(value) for _, value in row])
        name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
        if name in ("sum", "min", "max"):
            return getattr(values, name)()
        shares = values.new_tensor([share for share, _ in row])
        return (values * shares).sum() / shares.sum()


def _as_float(value: Any) -> Tensor:
    tensor = torch.as_tensor(value).reshape(())
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
