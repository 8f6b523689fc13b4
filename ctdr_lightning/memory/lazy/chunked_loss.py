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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ctdr_lightning.basics.torch_private import keeps_graph

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
        >>> torch.allclose(found, F.cross_entropy(hidden @ weight.T, target))
        True
    """
    return _ChunkedLoss.apply(hidden, weight, bias, target, terms, dtype)  # type: ignore[no-any-return]


def rows_of_chunk(n_classes: int, n_features: int) -> int:
    """Number of rows of a chunk: their logits and log-probabilities have as many bytes as the weight's gradient."""
    return max(n_features // 2, LEAST_ROWS, LEAST_OUTPUTS // n_classes)


def n_chunks(n_rows: int, weight: Tensor) -> int:
    """Number of chunks of a loss with a weight of shape (classes, features)."""
    return -(-n_rows // rows_of_chunk(*weight.shape))


class _Hard:
    """Targets that are class indices: what of the loss depends on rows alone, for all rows at once."""

    def __init__(self, target: Tensor, terms: LossTerms, classes: Tensor | None, n_classes: int, scale: Tensor) -> None:
        self._ignored = target == terms.ignored
        indices = target.masked_fill(self._ignored, 0).long()[:, None]
        counts = ~self._ignored[:, None] * scale
        weights = counts if classes is None else counts * classes[indices]
        on_target = weights * (1 - terms.smoothing)
        self._classes, self._each = classes, terms.smoothing / n_classes
        total = on_target + counts * (self._each * (n_classes if classes is None else classes.sum()))
        self.rows = (indices, -on_target, total, counts)
        self.divisor = weights.sum()

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

    def finished(self, losses: Tensor) -> Tensor:
        """Rows that count nothing, whose logits may be infinite, have no loss."""
        return losses.masked_fill_(self._ignored, 0)


class _Soft:
    """Targets that are probabilities of classes."""

    def __init__(self, target: Tensor, terms: LossTerms, classes: Tensor | None, n_classes: int, scale: Tensor) -> None:
        self._classes, self._smoothing, self._n_classes = classes, terms.smoothing, n_classes
        self.rows = (target, scale)
        self.divisor = scale.new_full((), len(target))

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

    def finished(self, losses: Tensor) -> Tensor:
        """All rows count."""
        return losses


class _Chunks:
    """The chunks of one loss: its losses, and its gradients where they are asked for."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        terms: LossTerms,
        dtype: torch.dtype,
        *,
        scale: Tensor | None = None,
    ) -> None:
        self._hidden, self._dtype, self._own = hidden, dtype, (weight, bias)
        self._weight, self._bias = weight.to(dtype), bias.to(dtype) if bias is not None else None
        self._wide = torch.promote_types(dtype, torch.float32)
        self._n_rows = rows_of_chunk(*weight.shape)
        classes = terms.weight.to(self._wide) if terms.weight is not None else None
        kind = _Soft if target.is_floating_point() else _Hard
        scale = hidden.new_ones(len(hidden), dtype=self._wide) if scale is None else scale.to(self._wide)
        self._targets: Any = kind(target, terms, classes, weight.shape[0], scale[:, None])
        self.divisor: Tensor = self._targets.divisor

    def losses(self, wanted: tuple[bool, ...]) -> tuple[Tensor, list[Tensor | None]]:
        """One loss a row, and the gradients of hidden, weight and bias by the sum of all; None where not wanted.

        Args:
            wanted: Which of the three gradients.
        """
        hidden, found = self._hidden, self._hidden.new_empty((len(self._hidden), 1), dtype=self._wide)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight, to_bias = (self._sum_like(t) if w else None for t, w in zip(self._own, wanted[1:], strict=True))
        written = to_hidden if to_hidden is not None else hidden
        chunks = [t.split(self._n_rows) for t in (hidden, written, found, *self._targets.rows)]
        for states, to_states, losses, *rows in zip(*chunks, strict=True):
            logs = self._logs(states)
            losses.copy_(self._targets.loss(logs, *rows))
            if not any(wanted):
                continue
            slope = self._targets.slope(logs, *rows)
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(self._dtype)
            if to_hidden is not None:
                to_states.copy_(slope @ self._weight)
            if to_weight is not None:
                _add_product(to_weight, slope, states.to(self._dtype))
            del logs, slope  # or the next chunk would be made beside them
        return self._targets.finished(found[:, 0]), [to_hidden, to_weight, to_bias]

    def _sum_like(self, tensor: Tensor | None) -> Tensor | None:
        """Sums over many chunks are kept in 32 bits at least."""
        if tensor is None:
            return None
        return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))

    def _logs(self, hidden: Tensor) -> Tensor:
        """The logarithms of the classes' probabilities."""
        logits = F.linear(hidden.to(self._dtype), self._weight, self._bias)
        return F.log_softmax(logits, 1, dtype=self._wide)


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
            ctx.scale = losses.new_ones(()) / chunks.divisor if reduction == "mean" else losses.new_ones(())
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
                chunks = _Chunks(*ctx.saved_tensors, *ctx.how, scale=slope)
                made = chunks.losses(tuple(ctx.needs_input_grad[:3]))[1]
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
