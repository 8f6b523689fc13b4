"""Attention whose projections are layers of their own, so that they can be decomposed.

``nn.MultiheadAttention`` holds three of its four weights as one bare parameter and reads ``out_proj.weight`` itself: no
layer runs that could be replaced. :class:`OpenAttention` computes the same with four linear layers that are called. It
still has every attribute of the class that it replaces, so that ``nn.TransformerEncoderLayer``'s fast path,
which reads the weights, computes with the factors' product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctdr_lightning.basics.interrupts import interrupts_held, put_back_after
from ctdr_lightning.decomposition.layers.surgery import replace_everywhere

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_FUSED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
_OWN = set(vars(nn.Module()))


def can_open(module: nn.Module) -> bool:
    """Whether a module is an attention whose forward is torch's own, with plain weights."""
    if not isinstance(module, nn.MultiheadAttention) or isinstance(module, OpenAttention):
        return False
    torch_s_own = type(module).forward is nn.MultiheadAttention.forward and "forward" not in vars(module)
    plain = all(type(p.data) is Tensor for p in module.parameters())
    return torch_s_own and plain and set(_FUSED) <= set(module._parameters)


class OpenAttention(nn.MultiheadAttention):
    """Multi-head attention with the children ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``, all called.

    Args:
        fused: The attention to replace. Its output projection and key and value biases are taken over; the fused
            input projection is copied into three linear layers.

    Example:
        >>> import torch
        >>> fused = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> torch.allclose(OpenAttention(fused)(x, x, x)[0], fused(x, x, x)[0], atol=1e-6)
        True
    """

    def __init__(self, fused: nn.MultiheadAttention) -> None:
        # The parent's constructor would make the weights that this class does without.
        nn.Module.__init__(self)
        vars(self).update({name: value for name, value in vars(fused).items() if name not in _OWN})
        hooks = {name: value for name, value in vars(fused).items() if name in _OWN and "hook" in name}
        vars(self).update({name: value for name, value in hooks.items() if "state_dict" not in name})
        self.fused_class = type(fused)
        for name, weight, bias in zip(PROJECTIONS, _weights(fused), _biases(fused), strict=True):
            self.add_module(name, _linear(weight, bias))
        self.out_proj = fused.out_proj
        self.bias_k, self.bias_v = fused.bias_k, fused.bias_v
        self.train(fused.training)

    def to_fused(self) -> nn.MultiheadAttention:
        """The fused attention again, with the weights that the projections have now."""
        fused: Any = self.fused_class.__new__(self.fused_class)
        nn.Module.__init__(fused)
        ours = {*_OWN, "fused_class"}
        vars(fused).update({name: value for name, value in vars(self).items() if name not in ours})
        vars(fused).update({name: vars(self)[name] for name in _OWN if "hook" in name and "state_dict" not in name})
        weights = [cast(Tensor, getattr(self, name).weight).detach() for name in PROJECTIONS]
        for name in _FUSED:
            fused.register_parameter(name, None)
        needs_grad = any(p.requires_grad for p in self._projection("q_proj").parameters())
        if self._qkv_same_embed_dim:
            fused.in_proj_weight = nn.Parameter(torch.cat(weights), needs_grad)
        else:
            for name, weight in zip(_FUSED[1:4], weights, strict=True):
                setattr(fused, name, nn.Parameter(weight.clone(), needs_grad))
        bias = self.in_proj_bias
        if bias is not None:
            fused.in_proj_bias = nn.Parameter(bias.detach().clone(), needs_grad)
        fused.out_proj = self.out_proj
        fused.bias_k, fused.bias_v = self.bias_k, self.bias_v
        return fused.train(self.training)

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        """The three projections' weights one above the other; None where their inputs differ in size."""
        if not self._qkv_same_embed_dim:
            return None
        return torch.cat([getattr(self, name).weight for name in PROJECTIONS])

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """The three projections' biases one after the other; None without biases."""
        biases = [getattr(self, name).bias for name in PROJECTIONS]
        return None if biases[0] is None else torch.cat(biases)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments, shapes and results as those of ``nn.MultiheadAttention``.

        Raises:
            RuntimeError: If ``is_causal`` is given without a mask.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = (self._projection(name)(x) for name, x in zip(PROJECTIONS, (query, key, value), strict=True))
        q, k, v = self._heads(q), *self._keys_and_values(k, v)
        hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if hint else self._mask(attn_mask, key_padding_mask, q, k.shape[-2])
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            mixed, weights = _attend(q, k, v, mask, dropout)
        else:
            mixed, weights = F.scaled_dot_product_attention(q, k, v, mask, dropout, hint), None
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _projection(self, name: str) -> nn.Module:
        return cast(nn.Module, self._modules[name])

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, features) as (batch, heads, length, features a head)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values by head, with the learned pair and the pair of zeros behind them where there are such."""
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), -1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return self._heads(k), self._heads(v)

    def _mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor, n_keys: int) -> Tensor | None:
        """The mask that is added to the scores, broadcast over (batch, heads, queries, keys)."""
        parts = []
        if attention is not None:
            added = _as_added(attention, q.dtype)
            parts.append(added if added.dim() == 2 else added.unflatten(0, (-1, self.num_heads)))
        if padding is not None:
            parts.append(_as_added(padding, q.dtype)[:, None, None, :])
        if not parts:
            return None
        mask = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return F.pad(mask, (0, n_keys - mask.shape[-1]))  # the keys that were appended are seen by all


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Hold every fused attention open while its layers are looked at and replaced, in place.

    Afterwards those with nothing but plain linear layers are the modules that they were, weights and all.

    """
    before: dict[nn.Module, nn.Module] = {}

    def put_back() -> None:
        untouched = {ours: fused for fused, ours in before.items() if _is_plain(ours)}
        replace_everywhere(model, cast("dict[nn.Module, nn.Module]", untouched))

    with put_back_after(put_back):
        with interrupts_held():
            before |= open_attention(model, lambda name: True)
        yield


def open_attention(model: nn.Module, chosen: Callable[[str], bool]) -> dict[nn.Module, nn.Module]:
    """Replace fused attentions below a model by their open form, in place.

    Args:
        model: Any module.
        chosen: Told the dotted name of a fused attention.

    Returns:
        Each fused attention and its open form.
    """
    fused = [cast(nn.MultiheadAttention, m) for name, m in model.named_modules() if can_open(m) and chosen(name)]
    swaps: dict[nn.Module, nn.Module] = {module: OpenAttention(module) for module in fused}
    replace_everywhere(model, swaps)
    return swaps


def close_attention(model: nn.Module, chosen: Callable[[str], bool]) -> None:
    """Fuse open attentions whose projections are all dense, in place.

    Args:
        model: Any module.
        chosen: Told the dotted name of an open attention.
    """
    ours = [m for name, m in model.named_modules() if isinstance(m, OpenAttention) and chosen(name)]
    replace_everywhere(model, {module: module.to_fused() for module in ours if _is_plain(module)})


def _is_plain(module: nn.Module) -> bool:
    return all(isinstance(child, nn.Linear) for child in module.children())


def _weights(fused: nn.MultiheadAttention) -> list[nn.Parameter]:
    if fused._qkv_same_embed_dim:
        return _thirds(fused.in_proj_weight)
    return [_copy(getattr(fused, name)) for name in _FUSED[1:4]]


def _biases(fused: nn.MultiheadAttention) -> list[nn.Parameter] | list[None]:
    return [None] * 3 if fused.in_proj_bias is None else _thirds(fused.in_proj_bias)


def _thirds(joint: nn.Parameter) -> list[nn.Parameter]:
    return [_copy(part, joint.requires_grad) for part in joint.detach().chunk(3)]


def _copy(tensor: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), tensor.requires_grad if requires_grad is None else requires_grad)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of any kind as numbers to add: minus infinity where a boolean mask forbids."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)
