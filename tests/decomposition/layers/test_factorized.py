"""Factorized layers where dense ones stood: attention, compilers, exporters, precisions, layouts."""

import copy
import io
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose, merge
from ctdr_lightning.decomposition import METHODS, FactorizedLayer
from tests.decomposition.cases import decay_

CONVOLUTION_METHODS = sorted(name for name in METHODS if name != "tt_linear")


def mixed_net(method: str) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ConvTranspose2d(16, 8, 3, stride=2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.Linear(64, 32),
    )
    report = decompose(net, rank=0.5, method=method, allocate=None)
    assert len(report.factorized) >= 4
    return net


@pytest.fixture
def x():
    return torch.randn(2, 3, 12, 12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_computes_with_the_factors_product(training, need_weights):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4, batch_first=True)}).train(training)
    report = decompose(model, rank=6)
    assert report.layers[0].decision == "factorized"
    tokens = torch.randn(2, 5, 32)
    merged = merge(copy.deepcopy(model))
    with torch.set_grad_enabled(training):
        outputs = [m["attention"](tokens, tokens, tokens, need_weights=need_weights)[0] for m in (model, merged)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    if training:
        outputs[0].sum().backward()
        assert all(p.grad is not None for p in model["attention"].out_proj.parameters())


@pytest.mark.parametrize("mode", ["train", "eval", "fast path"])
def test_transformer_encoder(mode):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    model.train(mode == "train")
    assert len(decompose(model, rank=6).factorized) == 12
    merged, tokens = merge(copy.deepcopy(model)), torch.randn(2, 5, 32)
    with torch.set_grad_enabled(mode != "fast path"):
        found, expected = model(tokens), merged(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["auto", "cp", "tt"])
def test_compile(method, x):
    net = mixed_net(method).train()
    expected = net(x)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = compiled(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("method", ["auto", "cp", "tt"])
def test_export(method, x):
    net = mixed_net(method).eval()
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
# The exporter wants the onnx packages; where they are not installed there is nothing to test.
@pytest.mark.parametrize("method", ["auto", "tt"] if find_spec("onnxscript") and find_spec("onnx") else [])
def test_onnx(method, x):
    from onnx.reference import ReferenceEvaluator

    net = mixed_net(method).eval()
    program = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
    model = program.model_proto
    found = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.tensor(found), net(x).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", CONVOLUTION_METHODS)
def test_deepcopy_and_state_round_trip(method, x):
    net = mixed_net(method).eval()
    expected = net(x)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x), expected)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in net.parameters()}
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    for p in twin.parameters():
        nn.init.zeros_(p)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(twin(x), expected)


@pytest.mark.parametrize("method", CONVOLUTION_METHODS)
def test_half_precision_and_autocast(method, x):
    net = mixed_net(method).eval()
    expected = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(net(x).float(), expected, rtol=0.1, atol=0.05)
    half = copy.deepcopy(net).to(torch.bfloat16)
    torch.testing.assert_close(half(x.bfloat16()).float(), expected, rtol=0.1, atol=0.05)
    born_half = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(4)).to(torch.bfloat16)
    decompose(born_half, rank=0.5, method=method, select="0", allocate=None)
    assert born_half[0].weight.dtype == torch.bfloat16


def test_channels_last_stays_channels_last(x):
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)).to(memory_format=torch.channels_last)
    decompose(net, rank=0.5, method="tucker")
    wide = next(factor for factor in net[1].factor_layers if factor.kernel_size == (3, 3))
    assert wide.weight.is_contiguous(memory_format=torch.channels_last)
    y = net(x.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    merge(net)
    assert net[1].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(net(x), y, rtol=1e-4, atol=1e-5)


def test_meta_device_gives_the_structure():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32))
    decompose(model, choices={"version": 1, "layers": {"0": {"decision": "factorized", "method": "svd", "ranks": [4]}}})
    assert all(p.is_meta for p in model.parameters())
    assert [tuple(factor.weight.shape) for factor in model[0].factor_layers] == [(4, 32), (32, 4)]


def test_attributes_of_the_dense_layer_are_kept():
    dense = nn.Conv2d(16, 8, (3, 5), stride=2, padding=(1, 2), dilation=1, padding_mode="reflect")
    model = nn.Sequential(copy.deepcopy(dense))
    decompose(model, rank=0.5)
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    assert all(getattr(model[0], name) == getattr(dense, name) for name in names)
    assert model[0].weight.shape == dense.weight.shape
    assert isinstance(model[0], FactorizedLayer)
    assert "Conv2d by" in repr(model)
    linear = nn.Sequential(nn.Linear(64, 32))
    decompose(linear, rank=0.5)
    assert (linear[0].in_features, linear[0].out_features) == (64, 32)


def test_weight_is_differentiable():
    model = nn.Sequential(decay_(nn.Linear(16, 16)))
    decompose(model, rank=4)
    model[0].weight.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (s.weight for s in model[0].factor_layers))


def test_replacing_the_weight_is_refused():
    model = nn.Sequential(nn.Linear(16, 16))
    decompose(model, rank=4)
    with pytest.raises((AttributeError, KeyError)):
        model[0].weight = nn.Parameter(torch.zeros(16, 16))
