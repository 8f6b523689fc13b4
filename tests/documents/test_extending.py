"""The examples of docs/extending.md: short, registered under their names, and used as built-in ones are."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ctdr_lightning import decompose, merge, restore
from ctdr_lightning.decomposition import METHODS
from ctdr_lightning.memory.codecs import CODECS, decode, encode
from ctdr_lightning.recovery import TRAINED_PARAMETERS
from ctdr_lightning.recovery.phases import chosen_parameters

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
METHOD, CODEC, RULE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(block):
    exec(compile(block, str(PAGE), "exec"), {})


@pytest.mark.parametrize("block", [METHOD, CODEC, RULE])
def test_each_is_under_twenty_lines(block):
    assert len([line for line in block.splitlines() if line.strip()]) < 20


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def test_a_method_of_ones_own_decomposes_merges_and_is_restored():
    with METHODS.temporarily():
        run(METHOD)
        x, usual, ours = torch.randn(2, 3, 8, 8), network(), network()
        ours.load_state_dict(usual.state_dict())
        decompose(usual, rank=4, method="svd")
        report = decompose(ours, rank=4, method="orthonormal_svd")
        assert {row.method for row in report.factorized} == {"orthonormal_svd"}
        torch.testing.assert_close(ours(x), usual(x), rtol=1e-4, atol=1e-5)
        last = ours[4].factor_layers[-1].weight
        torch.testing.assert_close(last.T @ last, torch.eye(4), rtol=1e-4, atol=1e-5)
        again = restore(network(), ours.state_dict())
        assert torch.equal(again.eval()(x), ours.eval()(x))
        torch.testing.assert_close(merge(again)(x), ours(x), rtol=1e-4, atol=1e-5)
    assert "orthonormal_svd" not in METHODS


def test_a_codec_of_ones_own_writes_and_reads():
    with CODECS.temporarily():
        run(CODEC)
        x = torch.randn(64)
        stack = encode(x, ("half",))
        assert stack.n_bytes == 128
        assert torch.equal(decode(stack), x.half().float())


def test_a_rule_of_ones_own_says_what_a_phase_trains():
    with TRAINED_PARAMETERS.temporarily():
        run(RULE)
        assert chosen_parameters(network(), "norms") == {"1.weight", "1.bias"}
    assert "norms" not in TRAINED_PARAMETERS
