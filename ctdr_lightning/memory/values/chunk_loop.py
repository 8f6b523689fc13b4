"""The loop of a cross entropy over chunks of its rows, as one operator: its results, and its costs on fake tensors.

A plan can change nothing within the loop, and the number of chunks grows with the batch: as single calls, GPT-2's loss
of 259 samples was 12,000 of a step's 14,000. Complexity: O(rows * classes * features) time. Its memory is that of one
chunk, which the loop itself shows when it runs one chunk on fake tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ctdr_lightning.basics.torch_private import OpOverload, TorchDispatchMode
from ctdr_lightning.memory.values.live_bytes import active_trackers, tell_trackers
from ctdr_lightning.memory.values.op_traits import traits
from ctdr_lightning.memory.values.tensors import tensors_in

_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor[] rows, Tensor? classes, float smoothing, int n_rows, "
    "ScalarType wide, ScalarType summed, bool[] wanted) -> Tensor[]"
)
_N_OF_HARD_TARGETS = 4
See = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], None]


class _Loop(NamedTuple):
    """The operator's arguments.

    Attributes:
        hidden: Hidden states of shape (rows, features).
        weight: Of shape (classes, features), in the dtype in which logits are computed.
        bias: Of shape (classes,), or None.
        rows: The targets: see :class:`_Hard` and :class:`_Soft`; each of as many rows.
        classes: One weight a class, or None.
        smoothing: Share of the target that all classes have alike.
        n_rows: Rows of a chunk.
        wide: The dtype of losses and logarithms.
        summed: The dtype of the gradients of weight and bias.
        wanted: The gradients to make: of hidden states, weight and bias.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Sequence[Tensor]
    classes: Tensor | None
    smoothing: float
    n_rows: int
    wide: torch.dtype
    summed: torch.dtype
    wanted: Sequence[bool]

    def results(self) -> list[Tensor]:
        """One loss a row, and sums of zero for the wanted gradients."""
        hidden, like = self.hidden, (self.weight, self.bias)
        found = [hidden.new_empty((len(hidden), 1), dtype=self.wide)]
        if self.wanted[0]:
            found.append(torch.empty_like(hidden))
        asked = [t for t, wanted in zip(like, self.wanted[1:], strict=True) if wanted and t is not None]
        return [*found, *(torch.zeros_like(t, dtype=self.summed) for t in asked)]

    def fill(self, found: list[Tensor]) -> list[Tensor]:
        """Compute these results.

        Args:
            found: What `results` made.
        """
        made = iter(found[1:])
        to_hidden, to_weight, to_bias = (next(made) if wanted else None for wanted in self.wanted)
        kind = _Hard if len(self.rows) == _N_OF_HARD_TARGETS else _Soft
        targets: Any = kind(self.classes, self.smoothing, len(self.weight))
        written = self.hidden if to_hidden is None else to_hidden
        chunks = [t.split(self.n_rows) for t in (self.hidden, written, found[0], *self.rows)]
        for states, to_states, losses, *rows in zip(*chunks, strict=True):
            logs = self._logs(states)
            losses.copy_(targets.loss(logs, *rows))
            if not any(self.wanted):
                continue
            slope = targets.slope(logs, *rows)
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(self.weight.dtype)
            if to_hidden is not None:
                to_states.copy_(slope @ self.weight)
            if to_weight is not None:
                _add_product(to_weight, slope, states.to(self.weight.dtype))
            del logs, slope  # or the next chunk would be made beside them
        return found

    def _logs(self, hidden: Tensor) -> Tensor:
        """The logarithms of the classes' probabilities."""
        logits = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        return F.log_softmax(logits, 1, dtype=self.wide)


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    if total.dtype == slope.dtype:
        total.addmm_(slope.T, hidden)
    else:
        total += slope.T @ hidden


class _Hard:
    """Targets that are class indices: these, minus the weight on the target, the total weight and the row's scale."""

    def __init__(self, classes: Tensor | None, smoothing: float, n_classes: int) -> None:
        self._classes, self._each = classes, smoothing / n_classes

    def loss(self, logs: Tensor, indices: Tensor, minus_on_target: Tensor, total: Tensor, counts: Tensor) -> Tensor:
        """The losses of some rows, of shape (rows, 1)."""
        loss = logs.gather(1, indices) * minus_on_target
        if self._each:
            everywhere = logs.sum(1) if self._classes is None else logs @ self._classes
            loss = loss - self._each * counts * everywhere[:, None]
        return loss

    def slope(self, logs: Tensor, indices: Tensor, minus_on_target: Tensor, total: Tensor, counts: Tensor) -> Tensor:
        """The gradient of these by the logits, in the place of the logarithms."""
        slope = logs.exp_().mul_(total).scatter_add_(1, indices, minus_on_target)
        if self._each:
            classes = torch.ones_like(slope[0]) if self._classes is None else self._classes
            slope.addr_(counts[:, 0], classes, alpha=-self._each)
        return slope


class _Soft:
    """Targets that are probabilities of classes: these, and the row's scale."""

    def __init__(self, classes: Tensor | None, smoothing: float, n_classes: int) -> None:
        self._classes, self._smoothing, self._n_classes = classes, smoothing, n_classes

    def _shares(self, target: Tensor, scale: Tensor) -> Tensor:
        shares = target.to(scale.dtype)
        if self._smoothing:
            shares = shares * (1 - self._smoothing) + self._smoothing / self._n_classes
        return shares * (scale if self._classes is None else scale * self._classes)

    def loss(self, logs: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        """The losses of some rows, of shape (rows, 1)."""
        return -(self._shares(target, scale) * logs).sum(1, keepdim=True)

    def slope(self, logs: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        """The gradient of these by the logits, in the place of the logarithms."""
        shares = self._shares(target, scale)
        return logs.exp_().mul_(shares.sum(1, keepdim=True)).sub_(shares)


@torch.library.custom_op("ctdr_lightning::cross_entropy_chunks", mutates_args=(), schema=_SCHEMA)
def cross_entropy_chunks(*args: Any) -> list[Tensor]:
    """The losses of all rows, and the wanted gradients of hidden states, weight and bias by their sum.

    Args:
        *args: The fields of `_Loop`.
    """
    loop = _Loop(*args)
    told = active_trackers() and loop.hidden.device.type == "cpu"  # elsewhere an allocator counts
    with _Calls(_tell) if told else nullcontext():
        return loop.fill(loop.results())


@cross_entropy_chunks.register_fake
def _looks(*args: Any) -> list[Tensor]:
    return _Loop(*args).results()


CHUNKS: OpOverload = torch.ops.ctdr_lightning.cross_entropy_chunks.default


def chunk_bytes(args: tuple[Any, ...]) -> int:
    """Bytes that a loop takes while it makes the logarithms of a chunk, its results included.

    Args:
        args: The operator's arguments.
    """
    loop = _Loop(*args)
    results = sum(
        t.numel() * dtype.itemsize
        for t, dtype, wanted in zip(args[:3], (loop.hidden.dtype, loop.summed, loop.summed), loop.wanted, strict=True)
        if wanted
    )
    n_logits = min(loop.n_rows, len(loop.hidden)) * len(loop.weight)
    return results + n_logits * (loop.weight.element_size() + loop.wide.itemsize)


class _Calls(TorchDispatchMode):
    """Shows the calls within an operator.

    Args:
        see: Called with each op, its arguments and its result.
    """

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call; below autograd torch composes no operator by itself."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question
            return func(*args, **kwargs)
        with self:
            composed = func.decompose(*args, **kwargs)
        if composed is not NotImplemented:
            return composed
        out = func(*args, **kwargs)
        self._see(func, args, kwargs, out)
        return out


def _results(out: Any) -> Iterable[Tensor]:
    return tensors_in(out if type(out) in (tuple, list) else (out,))


def _tell(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    tell_trackers(_results(out))


class Round:
    """One round of a loop: its calls, and the bytes of the tensors that they make.

    Args:
        args: The operator's arguments; tensors are fake.
        see: Called with each op, its arguments and its result.

    Attributes:
        levels: Bytes in addition to the loop's results, with the result of each call.
        n_rounds: The loop's rounds; of the last one its share of rows.
    """

    def __init__(self, args: tuple[Any, ...], see: See) -> None:
        self.levels: list[int] = []
        self._see, self._bytes = see, 0
        loop = _Loop(*args)
        states, rows = loop.hidden[: loop.n_rows], [t[: loop.n_rows] for t in loop.rows]
        first = _Loop(states, loop.weight, loop.bias, rows, *args[4:])
        self.n_rounds = len(loop.hidden) / max(len(states), 1)
        results = first.results()
        with _Calls(self._saw):
            first.fill(results)

    def _saw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        op = traits(func)
        for tensor in () if op.view or op.written else _results(out):
            self._add(tensor.nbytes)
            weakref.finalize(tensor, self._add, -tensor.nbytes)
        self.levels.append(self._bytes)
        self._see(func, args, kwargs, out)

    def _add(self, n_bytes: int) -> None:
        self._bytes += n_bytes
