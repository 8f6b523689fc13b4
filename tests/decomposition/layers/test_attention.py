"""An open attention against the fused one: every way to call it, every way to build it."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ctdr_lightning.decomposition.layers.attention import (
    OpenAttention,
    can_open,
    close_attention,
    open_attention,
    opened,
)

BUILDS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "key and value sizes": {"kdim": 6, "vdim": 10, "batch_first": True},
    "learned key and value": {"add_bias_kv": True, "batch_first": True},
    "zero key": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "double": {"dtype": torch.float64, "batch_first": True},
}
MASKS = ("none", "bool", "float", "per head", "causal", "padding", "float padding", "padding and bool")


def every(name):
    return True


def build(name):
    attention = nn.MultiheadAttention(16, 4, **BUILDS[name])
    for bias in (attention.in_proj_bias, attention.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    return attention


def inputs(attention, batched=True, n=3, n_queries=5, n_keys=7):
    sizes = [(n_queries, 16), (n_keys, attention.kdim), (n_keys, attention.vdim)]
    if batched:
        sizes = [(n, *s) if attention.batch_first else (s[0], n, s[1]) for s in sizes]
    dtype = attention.out_proj.weight.dtype
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def masks(name, n=3, heads=4, n_queries=5, n_keys=7):
    forbidden = torch.rand(n_queries, n_keys) < 0.3
    forbidden[:, 0] = False
    padding = torch.zeros(n, n_keys, dtype=torch.bool)
    padding[1, 4:] = True
    return {
        "none": {},
        "bool": {"attn_mask": forbidden},
        "float": {"attn_mask": torch.randn(n_queries, n_keys)},
        "per head": {"attn_mask": forbidden.repeat(n * heads, 1, 1)},
        "causal": {"attn_mask": torch.ones(n_queries, n_keys).tril().log(), "is_causal": True},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.zeros(n, n_keys).masked_fill(padding, -1e9)},
        "padding and bool": {"key_padding_mask": padding, "attn_mask": forbidden},
    }[name]


def same(ours, torchs):
    for mine, its in zip(ours, torchs, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("name", "mask"), list(itertools.product(BUILDS, MASKS)))
def test_it_computes_what_the_fused_attention_computes(name, mask, need_weights):
    fused = build(name)
    opened = OpenAttention(fused)
    given, how = inputs(fused), {**masks(mask), "need_weights": need_weights}
    how = {k: m.to(given[0].dtype) if torch.is_tensor(m) and m.is_floating_point() else m for k, m in how.items()}
    mine, its = opened(*given, **how), fused(*given, **how)
    same(mine, its)
    grads = [torch.autograd.grad(out[0].square().sum(), given) for out in (mine, its)]
    same(*grads)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", BUILDS)
def test_weights_by_head_and_inputs_without_a_batch(name, average):
    fused = build(name)
    opened = OpenAttention(fused)
    for batched in (True, False):
        given = inputs(fused, batched)
        same(opened(*given, average_attn_weights=average), fused(*given, average_attn_weights=average))


def test_dropout_falls_on_the_weights_in_training_only():
    fused = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    opened = OpenAttention(fused)
    x = torch.randn(2, 6, 16)
    assert not torch.equal(opened(x, x, x)[0], opened(x, x, x)[0])
    assert (opened(x, x, x, average_attn_weights=False)[1] == 0).float().mean() > 0.2
    same(opened.eval()(x, x, x), fused.eval()(x, x, x))


@pytest.mark.parametrize("name", BUILDS)
def test_it_fuses_again_to_the_bit(name):
    fused = build(name)
    model = nn.Sequential(nn.Linear(2, 2), copy.deepcopy(fused))
    keys = list(model.state_dict())
    open_attention(model, every)
    assert isinstance(model[1], OpenAttention)
    assert set(model.state_dict()) != set(keys)
    close_attention(model, every)
    assert type(model[1]) is nn.MultiheadAttention
    assert sorted(model.state_dict()) == sorted(keys)
    assert all(torch.equal(v, fused.state_dict()[k]) for k, v in model[1].state_dict().items())
    given = inputs(fused)
    assert torch.equal(model[1](*given)[0], fused(*given)[0])
    assert sum(p.numel() for p in model[1].parameters()) == sum(p.numel() for p in fused.parameters())


def test_what_was_only_looked_at_is_the_same_module_afterwards():
    model = nn.Sequential(build("plain"), build("no bias"))
    first, second = model
    with opened(model):
        assert all(isinstance(module, OpenAttention) for module in model)
        model[1].q_proj = nn.Sequential(model[1].q_proj)
    assert model[0] is first
    assert isinstance(model[1], OpenAttention)
    assert model[1] is not second


def test_frozen_projections_stay_frozen():
    fused = nn.MultiheadAttention(8, 2).requires_grad_(False)
    opened = OpenAttention(fused)
    assert not any(p.requires_grad for p in opened.parameters())
    assert not any(p.requires_grad for p in opened.to_fused().parameters())


def test_attentions_of_ones_own_are_left_alone():
    class Own(nn.MultiheadAttention):
        def forward(self, query, key, value, **how):
            return query, None

    assert not can_open(Own(8, 2))
    assert not can_open(nn.Linear(2, 2))
    assert not can_open(OpenAttention(nn.MultiheadAttention(8, 2)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_are_the_same_in_training_and_on_the_fast_path(masked, norm_first):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    ours = copy.deepcopy(encoder)
    open_attention(ours, every)
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    how = {"src_key_padding_mask": padding} if masked else {}
    same([ours(x, **how)], [encoder(x, **how)])
    encoder.eval()
    ours.eval()
    same([ours(x, **how)], [encoder(x, **how)])
    with torch.no_grad():
        same([ours(x, **how)], [encoder(x, **how)])


def test_a_decoder_is_the_same():
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2)
    ours = copy.deepcopy(decoder)
    open_attention(ours, every)
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    how = {"tgt_mask": causal, "tgt_is_causal": True}
    same([ours(x, memory, **how)], [decoder(x, memory, **how)])
