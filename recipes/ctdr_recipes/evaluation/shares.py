"""Which kinds of operations make the bytes that autograd saves: why one network gains where another does not."""

from __future__ import annotations

from collections import defaultdict

from ctdr_lightning.memory.traces.op_kinds import base_name
from ctdr_lightning.memory.traces.trace import OpRecord, Trace

# An op's name without overload and underscore, by kind; whatever else there is counts as "other".
KINDS = {
    "convolution": ("convolution",),
    "matrix product": ("addmm", "mm", "bmm", "baddbmm", "matmul", "linear"),
    "attention": (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_softmax",
        "_scaled_dot_product_efficient_attention",
    ),
    "normalization": ("native_batch_norm", "native_layer_norm", "native_group_norm", "cudnn_batch_norm", "batch_norm"),
    "activation": ("relu", "gelu", "silu", "tanh", "sigmoid", "hardswish", "leaky_relu"),
    "pooling": ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "mean"),
    "dropout": ("native_dropout", "bernoulli", "div", "empty_like"),
    "loss": ("_log_softmax", "nll_loss_forward"),
    "elementwise": ("mul", "pow", "sub", "where", "exp", "rsqrt", "neg"),
    "copy": ("clone", "_to_copy", "copy"),
    "joining": ("cat", "add", "stack"),
}  # fmt: skip


def kind_of_op(op: OpRecord) -> str:
    """The kind of an op, by its name."""
    plain = base_name(op).rstrip("_")
    return next((kind for kind, names in KINDS.items() if plain in names), "other")


def saved_shares(trace: Trace) -> dict[str, float]:
    """Share of the saved bytes that each kind of op made, the largest first.

    Args:
        trace: A recorded step.
    """
    found: dict[str, int] = defaultdict(int)
    for value in trace.saved:
        found[kind_of_op(trace.ops[trace.values[value].op])] += trace.value_bytes(value)
    whole = sum(found.values())
    return {kind: n / whole for kind, n in sorted(found.items(), key=lambda item: -item[1])}
