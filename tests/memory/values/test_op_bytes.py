"""What a call is about to make: as many bytes as it makes then, and no generator moves."""

import pytest
import torch

from ctdr_lightning.memory.values.live_bytes import LiveBytes, PeakMeter
from ctdr_lightning.memory.values.op_bytes import made_bytes

aten = torch.ops.aten
X, W, IMAGE, KERNEL = torch.ones(4, 6), torch.ones(6, 50), torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
CALLS = {
    "product": (aten.mm.default, (X, W), {}),
    "with a bias": (aten.addmm.default, (torch.ones(50), X, W), {}),
    "convolution": (aten.convolution.default, (IMAGE, KERNEL, None, *CONVOLUTION), {}),
    "its backward": (
        aten.convolution_backward.default,
        (torch.ones(2, 4, 8, 8), IMAGE, KERNEL, [4], *CONVOLUTION, [True, True, True]),
        {},
    ),
    "put together": (aten.cat.default, ([X, X, X],), {}),
    "expanded": (aten.clone.default, (X[:, :1].expand(4, 100),), {"memory_format": torch.contiguous_format}),
    "larger image": (aten.upsample_nearest2d.default, (IMAGE, [16, 16]), {}),
    "half as wide": (aten.mm.default, (X.bfloat16(), W.bfloat16()), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_the_call_makes(name):
    func, args, kwargs = CALLS[name]
    live = LiveBytes()
    out = func(*args, **kwargs)
    live.track(out if isinstance(out, tuple) else (out,))
    assert made_bytes(func, args, kwargs) == live.now > 0


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.relu.default, (X,)),  # no more than it reads
        (aten.view.default, (X, [24])),
        (aten.native_dropout.default, (X, 0.5, True)),
        (aten.mm.default, (X, X)),  # refused
        (aten.mm.default, (X.to_sparse(), W)),
    ],
)
def test_other_calls_have_no_answer(func, args):
    state = torch.get_rng_state()
    assert made_bytes(func, args, {}) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_no_meter_sees_the_question():
    with PeakMeter() as meter:
        assert made_bytes(*CALLS["product"]) == 800
    assert meter.live.peak == 0
