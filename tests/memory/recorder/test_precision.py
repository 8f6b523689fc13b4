"""Precisions by Lightning's names: what they change, what a card cannot do, and that nothing stays set."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory import record_fake


def step(net, x):
    return net(x).square().mean()


def dtypes(precision, device="a100"):
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    trace = record_fake(net, torch.empty(32, 64), step, device=device, precision=precision)
    products = {trace.values[op.outputs[0]].dtype for op in trace.ops if op.name == "aten.addmm.default"}
    return trace, products


@pytest.mark.parametrize(
    ("precision", "want"),
    [("32-true", "float32"), ("tf32", "float32"), ("bf16-mixed", "bfloat16"), ("16-mixed", "float16"),
     ("bf16-true", "bfloat16")],
)  # fmt: skip
def test_products_are_in_the_precision(precision, want):
    assert dtypes(precision)[1] == {want}


def test_weights_are_halved_only_where_all_is():
    whole, mixed, halved = (dtypes(p)[0].resident_bytes for p in ("32-true", "bf16-mixed", "bf16-true"))
    assert whole == mixed == 2 * halved


def test_a_processors_step_is_mixed_by_its_own_autocast():
    trace, products = dtypes("bf16-mixed", device=None)
    assert products == {"bfloat16"}
    assert trace.device == "cpu"


def test_what_was_set_is_set_again():
    for precision in ("tf32", "bf16-true", "16-mixed"):
        dtypes(precision)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize(
    ("precision", "device", "sentence"),
    [
        ("fp8", "a100", "precision 'fp8' is not known"),
        ("bf16-mixed", "t4", "t4 does not compute in bf16"),
        ("tf32", "v100", "v100 has no TF32"),
    ],
)
def test_what_a_card_cannot_do_is_refused(precision, device, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dtypes(precision, device)
