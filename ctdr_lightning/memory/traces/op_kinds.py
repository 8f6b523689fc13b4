"""Kinds of ops as the published systems tell them apart: products with weights, attention's core, the cheap rest."""

from __future__ import annotations

from ctdr_lightning.memory.traces.trace import OpRecord

TRACKED_VIEWS = {  # autograd knows their base, and their geometry is the rest
    f"aten.{name}"
    for name in (
        "view.default", "_reshape_alias.default", "t.default", "transpose.int", "permute.default", "unsqueeze.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "expand.default", "select.int", "slice.Tensor",
        "split.Tensor", "split_with_sizes.default", "unbind.int", "diagonal.default", "unfold.default",
    )
}  # fmt: skip  # fmt: skip
_WEIGHTED = ("convolution", "mm", "addmm", "embedding", "mkldnn_rnn_layer", "lstm", "gru", "_trilinear")
_BATCHED = ("bmm", "baddbmm")
_ATTENTION = ("_softmax", "_safe_softmax")


def base_name(op: OpRecord) -> str:
    """The op's name without namespace and overload, such as ``"addmm"``."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def is_weighted(op: OpRecord) -> bool:
    """Whether the op multiplies by or looks up in a weight: convolution, linear layer, embedding, recurrent layer."""
    name = base_name(op)
    return any(name == kind or name.endswith(f"_{kind}") for kind in _WEIGHTED)


def is_convolution(op: OpRecord) -> bool:
    """Whether the op is a convolution."""
    return "convolution" in base_name(op)


def is_attention_core(op: OpRecord) -> bool:
    """Whether the op belongs to attention between its projections: products of activations, softmax, fused kernels."""
    name = base_name(op)
    return name in _BATCHED or name in _ATTENTION or "scaled_dot_product" in name


def is_cheap(op: OpRecord) -> bool:
    """Whether the op is neither of these: pointwise, norm, pooling, copy."""
    return not is_weighted(op) and not is_attention_core(op)
