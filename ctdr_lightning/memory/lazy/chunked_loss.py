"""The cross entropy of a linear layer's outputs, a chunk of rows at a time: the outputs as a whole are never made.

The idea is that of Cut Cross Entropy (Wijmans et al., 2411.09009) and of Liger's fused loss: hidden states, weight and
targets determine the loss, and the gradient of a row's logits is known with the row's logits. Reproduced: gradients in
the forward for the reductions ``"mean"`` and ``"sum"``, so that the three matrix products of a plain head remain three;
for ``"none"``, whose gradient is not known there, a fourth in the backward. Beside those systems: class weights, label
smoothing and soft labels. Left out: fused kernels, and filtering of vanishing gradients.

Exact up to the rounding of sums over chunks. O(rows * classes * features) time. A chunk holds half as many logits as
the weight has elements, and these twice while their softmax is taken; at least ``LEAST_ROWS`` rows and
``LEAST_OUTPUTS`` logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ctdr_lightning.basics.torch_private import keeps_graph
from ctdr_lightning.memory.values.chunk_loop import cross_entropy_chunks

# Fewer rows make a product's reading of the weight longer than its arithmetic: at 128 features, chunks of 64 rows took
# 1.2 times as long as chunks of 128, and chunks of 768, which no cache holds, as well.
LEAST_ROWS = 128
# So many logits, 8 MiB in 32 bits, are made at once in any case: with 8,000 classes and 256 features, steps of GPT-2
# and Llama in chunks half as large took 1.10 times the plain step's time in the place of 1.03.
LEAST_OUTPUTS = 2**21


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
        >>> torch.allclose(found, torch.nn.functional.cross_entropy(hidden @ weight.T, target))
        True
    """
    return _ChunkedLoss.apply(hidden, weight, bias, target, terms, dtype)  # type: ignore[no-any-return]


def rows_of_chunk(n_classes: int, n_features: int) -> int:
    """Number of rows of a chunk: their logits and log-probabilities have as many bytes as the weight's gradient."""
    return max(n_features // 2, LEAST_ROWS, LEAST_OUTPUTS // n_classes)


def n_chunks(n_rows: int, weight: Tensor) -> int:
    """Number of chunks of a loss with a weight of shape (classes, features)."""
    return -(-n_rows // rows_of_chunk(*weight.shape))


class _Rows:
    """The part of a loss that depends on rows alone, for all rows at once.

    Attributes:
        parts: The targets as the loop over chunks takes them.
        classes: One weight a class, or None.
        divisor: The number of rows, or the sum of their weights, by which a mean divides.
    """

    def __init__(self, asked: _Asked) -> None:
        wide = torch.promote_types(asked.dtype, torch.float32)
        weight, target = asked.terms.weight, asked.target
        self.classes = weight.to(wide) if weight is not None else None
        scale = asked.hidden.new_ones(len(target), dtype=wide) if asked.scale is None else asked.scale.to(wide)
        self._ignored: Tensor | None = None
        if target.is_floating_point():
            self.parts, self.divisor = [target, scale[:, None]], scale.new_full((), len(target))
        else:
            self._ignored = target == asked.terms.ignored
            self.parts, self.divisor = self._hard(target, scale[:, None], asked.terms, len(asked.weight))

    def _hard(self, target: Tensor, scale: Tensor, terms: LossTerms, n_classes: int) -> tuple[list[Tensor], Tensor]:
        ignored, classes = self._ignored, self.classes
        assert ignored is not None
        indices = target.masked_fill(ignored, 0).long()[:, None]
        counts = ~ignored[:, None] * scale
        weights = counts if classes is None else counts * classes[indices]
        on_target = weights * (1 - terms.smoothing)
        everywhere = n_classes if classes is None else classes.sum()
        total = on_target + counts * (terms.smoothing / n_classes * everywhere)
        return [indices, -on_target, total, counts], weights.sum()

    def finished(self, losses: Tensor) -> Tensor:
        """Rows that count nothing, whose logits may be infinite, have no loss."""
        return losses if self._ignored is None else losses.masked_fill_(self._ignored, 0)


class _Asked(NamedTuple):
    """The arguments of `chunked_cross_entropy`, and one factor a row."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    terms: LossTerms
    dtype: torch.dtype
    scale: Tensor | None = None

    def losses(self, wanted: tuple[bool, ...]) -> tuple[Tensor, list[Tensor | None], Tensor]:
        """One loss a row, the gradients of hidden, weight and bias by the sum of all, and the divisor of their mean.

        Args:
            wanted: Which of the three gradients; None is in the place of the others.
        """
        weight, bias, rows = self.weight.to(self.dtype), self.bias, _Rows(self)
        bias = bias.to(self.dtype) if bias is not None else None
        wanted = (*wanted[:2], wanted[2] and bias is not None)
        # sums over many chunks are kept in 32 bits at least
        wide, summed = (torch.promote_types(t, torch.float32) for t in (self.dtype, self.weight.dtype))
        found, *made = cross_entropy_chunks(
            self.hidden, weight, bias, rows.parts, rows.classes, self.terms.smoothing,
            rows_of_chunk(*weight.shape), wide, summed, wanted,
        )  # fmt: skip
        gradients = iter(made)
        return rows.finished(found[:, 0]), [next(gradients) if w else None for w in wanted], rows.divisor


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in the forward and scaled in the backward; for one loss a row all are made in the backward."""

    @staticmethod
    def forward(ctx: Any, *asked: Any) -> Tensor:
        """The loss; the arguments are those of `chunked_cross_entropy`."""
        with torch.autocast(asked[0].device.type, enabled=False):
            reduction = asked[4].reduction
            ctx.dtypes = [t.dtype if t is not None else None for t in asked[:3]]
            if reduction == "none":
                ctx.save_for_backward(*asked[:4])
                ctx.how = asked[4:]
                return _Asked(*asked).losses((False, False, False))[0]
            losses, ctx.gradients, divisor = _Asked(*asked).losses(tuple(ctx.needs_input_grad[:3]))
            # apart from the gradients until the backward, where a loss scaler keeps 16 bits from underflow
            ctx.scale = losses.new_ones(()) / divisor if reduction == "mean" else losses.new_ones(())
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
                asked = _Asked(*ctx.saved_tensors, *ctx.how)._replace(scale=slope)
                made = asked.losses(tuple(ctx.needs_input_grad[:3]))[1]
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
