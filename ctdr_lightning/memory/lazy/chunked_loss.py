"""The cross entropy of a linear layer's outputs, a chunk of rows at a time: the outputs as a whole are never made.

The idea is that of Cut Cross Entropy (Wijmans et al., 2411.09009) and of Liger's fused loss: hidden states, weight and
targets determine the loss, and the gradient of a row's logits is known with the row's logits. Reproduced: gradients in
the forward for the reductions ``"mean"`` and ``"sum"``, so that the three matrix products of a plain head remain three;
for ``"none"``, whose gradient is not known there, a fourth in the backward. Beside those systems: class weights, label
smoothing and soft labels. Left out: fused kernels, and filtering of vanishing gradients.

Exact up to the rounding of sums over chunks. O(rows * classes * features) time. A chunk holds half as many logits as
the weight has elements, and these twice while their softmax is taken; at least ``LEAST_ROWS`` rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ctdr_lightning.basics.torch_private import keeps_graph

# Fewer rows make a product's reading of the weight longer than its arithmetic: at 128 features, chunks of 128 rows
# took 1.12 times as long as chunks of 256, and chunks of 768, which no cache holds, 1.19 times.
LEAST_ROWS = 256


@dataclass(frozen=True)
class LossTerms:
    """The arguments of a cross entropy, as those of `torch.nn.functional.cross_entropy`.

    Attributes:
        weight: One weight a class, or None.
        ignored: Class index whose rows count nothing.
        smoothing: Share of the target that all classes have alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    weight: Tensor | None = None
    ignored: int = -100
    smoothing: float = 0.0
    reduction: str = "mean"


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: LossTerms, dtype: torch.dtype
) -> Tensor:
    """The cross entropy of ``linear(hidden, weight, bias)``.

    Args:
        hidden: Of shape (rows, features).
        weight: Of shape (classes, features).
        bias: Of shape (classes,), or None.
        target: Class indices of shape (rows,), or probabilities of shape (rows, classes).
        terms: The loss.
        dtype: Type in which the logits are computed; the loss is computed in 32 bits at least.

    Returns:
        A scalar, or one loss a row for the reduction ``"none"``; in 32 bits at least.

    Example:
        >>> hidden, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
        >>> found = chunked_cross_entropy(hidden, weight, None, target, LossTerms(), torch.float32)
        >>> torch.allclose(found, F.cross_entropy(hidden @ weight.T, target))
        True
    """
    return _ChunkedLoss.apply(hidden, weight, bias, target, terms, dtype)  # type: ignore[no-any-return]


def rows_of_chunk(n_features: int) -> int:
    """Number of rows of a chunk: their logits and log-probabilities have as many bytes as the weight's gradient."""
    return max(n_features // 2, LEAST_ROWS)


def n_chunks(n_rows: int, n_features: int) -> int:
    """Number of chunks of a loss."""
    return -(-n_rows // rows_of_chunk(n_features))


class _Chunks:
    """The chunks of one loss: its losses, and its gradients where they are asked for."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: LossTerms, dtype: torch.dtype
    ) -> None:
        self._hidden, self._target, self._terms, self._dtype = hidden, target, terms, dtype
        self._own = (weight, bias)
        self._weight, self._bias = weight.to(dtype), bias.to(dtype) if bias is not None else None
        self._wide = torch.promote_types(dtype, torch.float32)
        self._rows = rows_of_chunk(weight.shape[1])
        self._classes = terms.weight.to(self._wide) if terms.weight is not None else None
        self._soft = target.is_floating_point()

    def losses(
        self, wanted: tuple[bool, bool, bool], scale: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """One loss a row, and the gradients of hidden, weight and bias; None where not wanted.

        Args:
            wanted: Which of the three gradients.
            scale: Gradient of each row's loss, of shape (rows,); None is 1.
        """
        hidden, found = self._hidden, self._hidden.new_empty(len(self._hidden), dtype=self._wide)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight, to_bias = (self._sum_like(t) if w else None for t, w in zip(self._own, wanted[1:], strict=True))
        for rows in self._slices():
            found[rows], slope = self._of(rows, any(wanted))
            if slope is None:
                continue
            slope = slope if scale is None else slope.mul_(scale[rows, None])
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(self._dtype)
            if to_hidden is not None:
                to_hidden[rows] = slope @ self._weight
            if to_weight is not None:
                _add_product(to_weight, slope, hidden[rows].to(self._dtype))
        return found, [to_hidden, to_weight, to_bias]

    def count(self) -> Tensor | float:
        """The divisor of the mean."""
        if self._soft:
            return float(len(self._target))
        counts = self._target != self._terms.ignored
        if self._classes is None:
            return counts.sum()
        return (self._classes[torch.where(counts, self._target, 0).long()] * counts).sum()

    def _slices(self) -> Iterator[slice]:
        for begin in range(0, len(self._hidden), self._rows):
            yield slice(begin, begin + self._rows)

    def _sum_like(self, tensor: Tensor | None) -> Tensor | None:
        """Sums over many chunks are kept in 32 bits at least."""
        if tensor is None:
            return None
        return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))

    def _of(self, rows: slice, slopes: bool) -> tuple[Tensor, Tensor | None]:
        """The losses of some rows, and the gradient of these by their logits."""
        logits = F.linear(self._hidden[rows].to(self._dtype), self._weight, self._bias)
        logs = F.log_softmax(logits, 1, dtype=self._wide)
        del logits  # its bytes serve the gradient
        return self._soft_loss(logs, rows, slopes) if self._soft else self._hard_loss(logs, rows, slopes)

    def _hard_loss(self, logs: Tensor, rows: slice, slopes: bool) -> tuple[Tensor, Tensor | None]:
        counts = self._target[rows] != self._terms.ignored
        classes = torch.where(counts, self._target[rows], 0)[:, None].long()
        share = counts.to(self._wide)
        on_target = share * (1 - self._terms.smoothing)
        if self._classes is not None:
            on_target = on_target * self._classes[classes[:, 0]]
        loss, total = -on_target * logs.gather(1, classes)[:, 0], on_target
        each = self._terms.smoothing / logs.shape[1]
        if each:
            all_of = logs.sum(1) if self._classes is None else logs @ self._classes
            loss = loss - share * each * all_of
            n_classes = logs.shape[1] if self._classes is None else self._classes.sum()
            total = total + share * each * n_classes
        loss = loss.masked_fill(~counts, 0)  # whose logits may be infinite
        if not slopes:
            return loss, None
        slope = logs.exp_().mul_(total[:, None]).scatter_add_(1, classes, -on_target[:, None])
        if each:
            spread = torch.ones_like(slope[0]) if self._classes is None else self._classes
            slope.addr_(share, spread, alpha=-each)
        return loss, slope

    def _soft_loss(self, logs: Tensor, rows: slice, slopes: bool) -> tuple[Tensor, Tensor | None]:
        smoothing = self._terms.smoothing
        shares = self._target[rows].to(self._wide)
        if smoothing:
            shares = shares * (1 - smoothing) + smoothing / logs.shape[1]
        if self._classes is not None:
            shares = shares * self._classes
        loss = -(shares * logs).sum(1)
        return loss, logs.exp_().mul_(shares.sum(1, keepdim=True)).sub_(shares) if slopes else None


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    if total.dtype == slope.dtype:
        total.addmm_(slope.T, hidden)
    else:
        total += slope.T @ hidden


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in the forward and scaled in the backward; for one loss a row all are made in the backward."""

    @staticmethod
    def forward(ctx: Any, *asked: Any) -> Tensor:
        """The loss; the arguments are those of `chunked_cross_entropy`."""
        with torch.autocast(asked[0].device.type, enabled=False):
            chunks, reduction = _Chunks(*asked), asked[4].reduction
            ctx.dtypes = [t.dtype if t is not None else None for t in asked[:3]]
            if reduction == "none":
                ctx.save_for_backward(*asked[:4])
                ctx.how = asked[4:]
                return chunks.losses((False, False, False))[0]
            losses, ctx.gradients = chunks.losses(tuple(ctx.needs_input_grad[:3]))
            # apart from the gradients until the backward, where a loss scaler keeps 16 bits from underflow
            ctx.scale = losses.new_ones(()) / chunks.count() if reduction == "mean" else losses.new_ones(())
            return losses.sum() * ctx.scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, weight and bias.

        Raises:
            RuntimeError: On a second call where the first was not asked to keep the graph.
        """
        if slope.dim():
            with torch.autocast(slope.device.type, enabled=False):
                made = _Chunks(*ctx.saved_tensors, *ctx.how).losses(tuple(ctx.needs_input_grad[:3]), slope)[1]
        else:
            made = _scaled(ctx, slope)
        typed = [t.to(dtype) if t is not None else None for t, dtype in zip(made, ctx.dtypes, strict=True)]
        return (*typed, None, None, None)


def _scaled(ctx: Any, slope: Tensor) -> list[Tensor | None]:
    if ctx.gradients is None:
        raise RuntimeError(
            "The gradients of a loss in chunks were used up by an earlier backward. "
            "HINT: give that one retain_graph=True."
        )
    made, scale = ctx.gradients, slope * ctx.scale
    if keeps_graph():
        return [t * scale if t is not None else None for t in made]
    ctx.gradients = None
    return [t.mul_(scale) if t is not None else None for t in made]
