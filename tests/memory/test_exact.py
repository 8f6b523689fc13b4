"""Whatever a plan drops, a step leaves the same loss, gradients, buffers and RNG state behind, to the bit."""

import pytest

from tests.memory.harness import Bench, check
from tests.memory.zoo import ZOO, build

QUICK = (
    "resnet18", "squeezenet1_0", "shufflenet_v2_x0_5", "lraspp_mobilenet_v3_large", "vision_transformer", "gpt2",
    "bert", "t5", "llama", "mixtral", "vit", "lstm",
)  # fmt: skip
LONG = {"shufflenet_v2_x0_5", "lraspp_mobilenet_v3_large"}  # ten seconds each


def test_the_zoo_is_as_large_as_promised():
    assert len(ZOO) >= 40


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in QUICK])
def test_a_dozen_nets(name):
    check(Bench(*build(name)), seeds=2)


@pytest.mark.exhaustive  # test_tape_away has them among the slow tests, with all actions
@pytest.mark.parametrize("name", [name for name in ZOO if name not in QUICK])
def test_every_other_net(name):
    check(Bench(*build(name)), seeds=2)
