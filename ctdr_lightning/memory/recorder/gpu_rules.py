"""The kernels that torch picks on a named NVIDIA GPU, chosen by rule.

torch picks some kernels by asking the card (attention), others by asking a tensor for its device (dropout, BatchNorm,
recurrent layers, autocast). Neither can answer for a GPU that is not there. Each rule names the source that it follows;
the sources are torch 2.13's, below ``aten/src/ATen/``. `on_gpu` puts the rules in the place of torch's own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.basics.torch_private import OpOverload, as_composite, tree_map_only

aten = torch.ops.aten
Rule = Callable[..., Any]
HALVES = (torch.float16, torch.bfloat16)

# ---- scaled-dot-product attention ------------------------------------------------------------------------------------
# native/transformers/cuda/sdp_utils.cpp: `priority_order` and `can_use_{cudnn,flash,mem_efficient}_attention`; the code
# around each kernel: native/transformers/attention.cpp.
_FLASH_SM, _EFFICIENT_SM = (8, 0), (5, 0)
_NEWEST_SM = (12, 1)
_MOST_HEAD_DIM = 256
# `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`
_SMALL_SM = ((8, 6), (8, 9)), ((12, 0), (12, 1))
# `check_prefer_cudnn_attention`: Hopper and data centre Blackwell, with a cuDNN newer than 9.15.0.
_CUDNN_FIRST, _CUDNN_NEEDED = ((9, 0), (9, 3), (10, 0), (10, 3)), 91500
_MASK_ALIGNMENT = _HEAD_ALIGNMENT = 8  # `preprocess_mask`, `pad_last_dim`


def attention_kernel(
    gpu: DeviceModel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, enable_gqa: bool = False,
) -> str:  # fmt: skip
    """Which kernel scaled-dot-product attention runs.

    Args:
        gpu: Model of the card.
        query: Shape ``(N, heads, L, E)``; any other number of axes takes the math.
        key: Shape ``(N, heads, S, E)``.
        value: Shape ``(N, heads, S, Ev)``.
        mask: Boolean or added to the products; None if there is none.
        dropout_p: Share of the weights that is dropped.
        is_causal: Whether later positions are masked.
        enable_gqa: Whether several heads of the query may share one of key and value.

    Returns:
        ``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``.
    """
    sm = gpu.compute_capability or (0, 0)
    if not _shapes_fit(query, key, value):
        return "math"
    grouped = key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]
    if grouped and not enable_gqa:
        return "math"
    half = query.dtype in (HALVES if sm >= (8, 0) else HALVES[:1])
    order = ("cudnn", "flash", "efficient") if _prefers_cudnn(sm) else ("flash", "efficient")
    able = {
        "cudnn": half and _cudnn_takes(sm, query, key, value, mask, dropout_p),
        "flash": half and mask is None and _flash_takes(sm, query, key, value, dropout_p, is_causal),
        "efficient": not grouped and _efficient_takes(sm, query, key, value),
    }
    return next((kernel for kernel in order if able[kernel] and _enabled(kernel)), "math")


def _shapes_fit(*tensors: Tensor) -> bool:
    """Whether all have four axes, the same batch, something in them, and neighbours in the last axis."""
    return (
        all(t.dim() == 4 and t.shape[2] and (t.stride(-1) == 1 or t.shape[-1] == 1) for t in tensors)
        and len({t.shape[0] for t in tensors}) == 1
    )


def _enabled(kernel: str) -> bool:
    """Whether the user's ``sdpa_kernel`` leaves the kernel on."""
    cuda = torch.backends.cuda
    asked = {
        "cudnn": cuda.cudnn_sdp_enabled, "flash": cuda.flash_sdp_enabled, "efficient": cuda.mem_efficient_sdp_enabled,
    }  # fmt: skip
    return asked[kernel]()


def _prefers_cudnn(sm: tuple[int, int]) -> bool:
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    # A CPU wheel bundles no cuDNN; the CUDA wheels of the same release bundle one that is new enough.
    return sm in _CUDNN_FIRST and (version is None or version > _CUDNN_NEEDED)


def _flash_takes(
    sm: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool
) -> bool:
    head_dim = query.shape[-1]
    if not _FLASH_SM <= sm <= _NEWEST_SM or head_dim > _MOST_HEAD_DIM:
        return False
    if not head_dim == key.shape[-1] == value.shape[-1] or (is_causal and query.shape[2] != key.shape[2]):
        return False
    too_large = 192 < head_dim <= 224 or (head_dim > 224 and dropout_p > 0)
    small = any(least <= sm <= most for least, most in _SMALL_SM)
    return not (too_large and small and any(t.requires_grad for t in (query, key, value)))


def _efficient_takes(sm: tuple[int, int], query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not _EFFICIENT_SM <= sm <= _NEWEST_SM:
        return False
    half = query.dtype in HALVES
    if query.dtype not in (torch.float32, torch.float16, *((torch.bfloat16,) if sm >= (8, 0) else ())):
        return False
    # `minimum_gemm_alignment`
    tensor_cores = sm >= (8, 0) or (half and sm >= (7, 0))
    alignment = max(4 if sm >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)
    dims = query.shape[-1], value.shape[-1]
    return query.shape[-1] == key.shape[-1] and all(n > 0 and n % alignment == 0 for n in dims)


def _cudnn_takes(
    sm: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float
) -> bool:
    dims = query.shape[-1], value.shape[-1]
    most = 256 if sm == (9, 0) else 192 if sm[0] == 10 and dims == (192, 128) else 128
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if mask is not None and mask.dim() not in (2, 4):
        return False
    few = key.shape[2] == 1 or (query.shape[2] == 1 and dropout_p > 0)
    return not few and all(n <= most and n % 8 == 0 for n in dims)


def attention(
    gpu: DeviceModel, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Scaled-dot-product attention with the GPU's kernel."""
    kernel = attention_kernel(gpu, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    mask = _added(attn_mask, query.dtype, torch.finfo(torch.float16).min if kernel == "cudnn" else -torch.inf)
    if kernel == "cudnn":
        call = aten._scaled_dot_product_cudnn_attention.default
        return call(query, key, value, mask, trained, dropout_p, is_causal, False, scale=scale)[0]
    if kernel == "efficient":
        call = aten._scaled_dot_product_efficient_attention.default
        mask = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        return call(query, key, value, mask, trained, dropout_p, is_causal, scale=scale)[0]
    call = aten._scaled_dot_product_attention_math.default
    return call(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    size = query.shape[-1]
    missing = -size % _HEAD_ALIGNMENT
    if missing:
        query, key, value = (pad(t, (0, missing)) for t in (query, key, value))
    call = aten._scaled_dot_product_flash_attention.default
    out: Tensor = call(query, key, value, dropout_p, is_causal, False, scale=size**-0.5 if scale is None else scale)[0]
    return out[..., :size] if missing else out


def _added(mask: Tensor | None, dtype: torch.dtype, least: float) -> Tensor | None:
    """`convert_boolean_attn_mask`: a boolean mask as numbers to add."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(least, dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> Tensor:
    """`preprocess_mask`: rows of a multiple of eight numbers."""
    if mask.stride(-1) == 1 and all(n % _MASK_ALIGNMENT == 0 for n in mask.stride()[:-1]):
        return mask
    size = mask.shape[-1]
    return pad(mask, (0, _MASK_ALIGNMENT - size % _MASK_ALIGNMENT))[..., :size]


# ---- normalization ---------------------------------------------------------------------------------------------------
# native/Normalization.cpp: `_select_batch_norm_backend`
def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """BatchNorm by cuDNN where it takes the call, else by torch's own kernel."""
    most = 880_801 if training else 65_535
    by_cudnn = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
        and input.dtype is not torch.bfloat16
        and weight.dtype is not torch.bfloat16
        and (input.dtype is not torch.float16 or weight.dtype is torch.float32)
        and input.dim() >= 3
        and 0 < input.shape[0] <= most
        and input.numel() > 0
    )
    stats = running_mean, running_var, training, momentum, eps
    if not by_cudnn:
        return as_composite(aten.batch_norm.default, input, weight, bias, *stats, cudnn_enabled)
    assert input.dim() >= 3
    layout = _suggested_format(input)
    return aten.cudnn_batch_norm.default(input.contiguous(memory_format=layout), weight, bias, *stats)[0]


def _suggested_format(tensor: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(tensor.dim())
    last = found is not None and tensor.is_contiguous(memory_format=found) and not tensor.is_contiguous()
    return found if last and found is not None else torch.contiguous_format


# ---- dropout, softmax ------------------------------------------------------------------------------------------------
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """native/Dropout.cpp, `is_fused_kernel_acceptable`: one kernel, which keeps a mask of one byte an element."""
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout.default(input, p, train)[0]
    return as_composite(aten.dropout.default, input, p, train)


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """native/SoftMax.cpp: from fp16 to fp32 without a copy in fp32."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax.default(input, dim, True)
    return as_composite(aten.softmax.int, input, dim, dtype)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """native/SoftMax.cpp: from fp16 to fp32 without a copy in fp32."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax.default(input, dim, True)
    return as_composite(aten.log_softmax.int, input, dim, dtype)


# ---- recurrent layers ------------------------------------------------------------------------------------------------
# native/RNN.cpp and native/cudnn/RNN.cpp: `_cudnn_impl`; modes of `cudnnRNNMode_t`. A module that was moved to a GPU
# has flattened its weights, so that no copy of them is made: one of the weights takes the part of the flat buffer.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
# cuDNN does not document its reserve space for the backward. Here it holds the backward's inputs, per step, layer,
# direction and unit: the gates, the cell's state, the layer's output.
_KEPT = {0: 2, 1: 2, 2: 6, 3: 5}


def _recurrent(name: str, *, packed: bool) -> Rule:
    own = getattr(getattr(aten, name), "data" if packed else "input")

    def run(input: Tensor, *args: Any) -> Any:
        """A recurrent layer by cuDNN."""
        if not torch.backends.cudnn.enabled or input.dtype not in (torch.float32, torch.float64, *HALVES):
            return as_composite(own, input, *args)
        batch_sizes = args[0].tolist() if packed else []
        return _by_cudnn(name, batch_sizes, input, *(args[1:] if packed else args))

    return run


def _by_cudnn(
    name: str, batch_sizes: list[int], input: Tensor, hx: Any, params: list[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool = False,
) -> Any:  # fmt: skip
    states = tuple(hx) if name == "lstm" else (hx,)
    input, params, states = _as_autocast((input, params, states))
    hidden, out = states[-1].shape[-1], states[0].shape[-1]
    cell = states[1] if len(states) > 1 else None
    stride = (4 if has_biases else 2) + (hidden != out)
    with torch.autocast("cuda", enabled=False):
        found = aten._cudnn_rnn.default(
            input, params, stride, params[0].detach(), states[0].contiguous(), cell, _MODES[name], hidden,
            out if out != hidden else 0, num_layers, batch_first, dropout, train, bidirectional, batch_sizes, None,
        )  # fmt: skip
    return found[: 1 + len(states)]


def _as_autocast(nest: Any) -> Any:
    """cudnn/AutocastRNN.cpp, `_cudnn_rnn_cast_reflatten`: all of it in the lower precision."""
    if not torch.is_autocast_enabled("cuda"):
        return nest
    dtype = torch.get_autocast_dtype("cuda")
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, nest)


def _cudnn_rnn_kept(args: Sequence[Any], out: Any) -> Any:
    """The reserve, which torch's fake kernel leaves empty."""
    mode, hidden, layers, train, directions = args[6], args[7], args[9], args[12], 1 + args[13]
    steps = out[0].numel() // out[0].shape[-1]
    kept = steps * layers * directions * hidden * _KEPT[mode] * out[0].element_size() if train else 0
    return *out[:3], out[3].new_empty(kept), *out[4:]


def _cudnn_rnn_gradients(args: Sequence[Any]) -> Any:
    input, weights, hx, cx = args[0], args[1], args[4], args[5]
    asked = args[-1]
    made = [
        t.new_empty(t.shape) if t is not None and wanted else None
        for t, wanted in zip((input, hx, cx), asked, strict=False)
    ]
    return *made, [w.new_empty(w.shape) for w in weights] if asked[3] else []


def _gru_cell_made(args: Sequence[Any]) -> Any:
    n, hidden = args[2].shape
    return args[2].new_empty(n, hidden), args[2].new_empty(n, 5 * hidden)


def _gru_cell_gradients(args: Sequence[Any]) -> Any:
    grad, workspace, has_bias = args
    n, gates = grad.shape[0], 3 * grad.shape[1]
    biases = [grad.new_empty(gates) if has_bias else None for _ in range(2)]
    return workspace.new_empty(n, gates), workspace.new_empty(n, gates), grad.new_empty(grad.shape), *biases


# Kernels that torch has on a GPU alone, and no fake ones for: from the arguments to results of the right shapes.
FAKE_KERNELS: dict[OpOverload, Callable[[Sequence[Any]], Any]] = {
    aten._cudnn_rnn_backward.default: _cudnn_rnn_gradients,
    aten._thnn_fused_gru_cell.default: _gru_cell_made,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_gradients,
}
# Results that torch's fake kernels give in another size: from the arguments and these to the right ones.
MENDED: dict[OpOverload, Callable[[Sequence[Any], Any], Any]] = {aten._cudnn_rnn.default: _cudnn_rnn_kept}


def lstm_cell(
    input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """native/RNN.cpp, `LSTMCell`: one kernel behind the two products."""
    gates = input.matmul(w_ih.t()), hx[0].matmul(w_hh.t())
    hidden, cell, _ = aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)
    return hidden, cell


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """native/RNN.cpp, `GRUCell`: one kernel behind the two products."""
    gates = input.matmul(w_ih.t()), hx.matmul(w_hh.t())
    hidden: Tensor = aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]
    return hidden


def card_rules(gpu: DeviceModel) -> dict[OpOverload, Rule]:
    """Rules for questions that torch puts to the card or to cuDNN: no build of torch can answer for an absent card."""

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return attention(gpu, *args, **kwargs)

    return {
        aten.scaled_dot_product_attention.default: attend,
        aten.batch_norm.default: batch_norm,
        **{getattr(aten, name).input: _recurrent(name, packed=False) for name in _MODES},
        **{getattr(aten, name).data: _recurrent(name, packed=True) for name in _MODES},
    }


def device_rules() -> dict[OpOverload, Rule]:
    """Rules for questions that torch puts to a tensor's device: a build with CUDA answers itself."""
    return {
        aten.dropout.default: dropout,
        aten.softmax.int: softmax,
        aten.log_softmax.int: log_softmax,
        aten.lstm_cell.default: lstm_cell,
        aten.gru_cell.default: gru_cell,
    }


# ---- autocast --------------------------------------------------------------------------------------------------------
# autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP, with the additions of autocast_mode.cpp for CUDA.
LOWER = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
cudnn_convolution_transpose"""
# AT_FORALL_FP32
FULL = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa"""
# AT_FORALL_FP32_SET_OPT_DTYPE
FULL_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList"""
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: from the overload to the one that takes a dtype
FULL_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# AT_FORALL_PROMOTE
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
