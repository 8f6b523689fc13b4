"""Properties over the hyperparameters of convolutions."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ctdr_lightning.decomposition import METHODS
from ctdr_lightning.decomposition.layers.surgery import factorize
from ctdr_lightning.decomposition.shapes.geometry import CONVOLUTIONS
from tests.decomposition.cases import geometry_of

QUICK = settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
_METHODS = sorted(METHODS)


@st.composite
def convolutions(draw):
    n = draw(st.integers(1, 3))
    transposed = draw(st.booleans())

    def axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    groups = draw(st.sampled_from((1, 1, 2, 3)))
    sizes = [groups * draw(st.integers(1, 4)) for _ in range(2)]
    kernel, stride, dilation = axis(1, 4), axis(1, 3), axis(1, 2)
    options = {"stride": stride, "dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    if transposed:
        options["padding"] = tuple(min(p, d * (k - 1)) for p, d, k in zip(axis(0, 2), dilation, kernel, strict=True))
        options["output_padding"] = tuple(min(o, s - 1) for o, s in zip(axis(0, 1), stride, strict=True))
    else:
        options["padding_mode"] = draw(st.sampled_from(("zeros", "reflect", "replicate", "circular")))
        same = draw(st.booleans()) and max(stride) == 1
        options["padding"] = "same" if same else axis(0, 2)
    layer = CONVOLUTIONS[n, transposed](*sizes, kernel, **options)
    x = torch.randn(draw(st.integers(1, 2)), sizes[0], *(draw(st.integers(7, 9)) for _ in range(n)))
    return layer, x


@QUICK
@given(convolutions(), st.sampled_from(_METHODS))
def test_full_rank_gives_the_layers_output(pair, method):
    layer, x = pair
    geometry = geometry_of(layer)
    assume(METHODS[method].supports(geometry))
    new = factorize(layer, geometry, method, METHODS[method].max_ranks(geometry))
    expected = layer(x)
    assert new(x).shape == expected.shape
    assert (new(x) - expected).norm() <= 1e-5 * expected.norm() + 1e-6
    dense = new.to_dense()
    assert (dense(x) - expected).norm() <= 1e-5 * expected.norm() + 1e-6


@QUICK
@given(convolutions())
def test_canonical_form_is_undone(pair):
    layer, _ = pair
    geometry = geometry_of(layer)
    canonical = geometry.canonical(layer.weight)
    assert canonical.shape == (geometry.groups, *geometry.group_shape)
    assert torch.equal(geometry.native(canonical), layer.weight)
    assert geometry.n_weights == layer.weight.numel()


@pytest.mark.slow
@QUICK
@given(convolutions(), st.sampled_from(_METHODS))
def test_output_sizes_operations_and_elements_are_torchs(pair, method):
    layer, x = pair
    geometry = geometry_of(layer)
    assume(METHODS[method].supports(geometry))
    axes = tuple(x.shape[2:])
    with FlopCounterMode(display=False) as counted:
        y = layer(x)
    assert geometry.output_axes(axes) == tuple(y.shape[2:])
    assert geometry.flops(axes) * len(x) == counted.get_total_flops()

    ranks = METHODS[method].uniform(geometry, 2)
    new = factorize(layer, geometry, method, ranks)
    made = []
    for stage in new.factor_layers:
        stage.register_forward_hook(lambda _m, _a, out: made.append(out.numel()))
    with FlopCounterMode(display=False) as counted:
        new(x)
    costs = METHODS[method].costs(geometry, ranks, axes)
    assert sum(cost.flops for cost in costs) * len(x) == counted.get_total_flops()
    assert [cost.outputs * len(x) for cost in costs] == made


@QUICK
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 4), st.sampled_from(("svd", "tt_linear")))
def test_linear_layers(n_in, n_out, rank, method):
    layer, x = nn.Linear(n_in, n_out), torch.randn(3, 4, n_in)
    geometry = geometry_of(layer)
    full = factorize(layer, geometry, method, METHODS[method].max_ranks(geometry))
    assert (full(x) - layer(x)).norm() <= 1e-5 * layer(x).norm() + 1e-6
    ranks = METHODS[method].uniform(geometry, rank)
    low = factorize(layer, geometry, method, ranks)
    torch.testing.assert_close(low(x), low.to_dense()(x), rtol=1e-4, atol=1e-5)
    with FlopCounterMode(display=False) as counted:
        low(x)
    assert sum(cost.flops for cost in METHODS[method].costs(geometry, ranks, (3, 4))) == counted.get_total_flops()
